"""Seconds of collectives: laws that hold on every machine, and numbers that are published."""

from __future__ import annotations

import itertools

import pytest

from isoshard.core.errors import ShardingError
from isoshard.planner.costs.collective_times import KINDS, LINKS_REACH, seconds
from isoshard.planner.machine.links import links_of
from isoshard.planner.machine.topologies import topology

MESHES = {
    "ring": ("v5e:16x16", (16, 16)),
    "line": ("v5e:4x4", (4, 4)),
    "shared": ("v5e:16x16", (64, 4)),
    "cubes": ("v5p:4x4x8", (8, 16)),
    "slices": ("v5e:4*4x4", (16, 4)),
    "hosts": ("h100:4x8", (8, 4)),
    "racks": ("gb200:2x18x4", (4, 36)),
    "memory": ("cpu:8", (2, 4)),
}
AXES = [("a",), ("b",), ("a", "b")]
LARGE = 2**32


@pytest.fixture(params=MESHES)
def mesh(request):
    text, shape = MESHES[request.param]
    return topology(text).mesh(shape, ("a", "b"))


def told(kind, sent, axes, mesh):
    return seconds(kind, sent, axes, mesh, reach=1.0)


def test_laws_of_every_machine(mesh):
    for axes, kind in itertools.product(AXES, KINDS):  # bytes, and a latency
        times = [told(kind, sent, axes, mesh) for sent in (1, 10**3, 10**6, 10**9)]
        assert times == sorted(times) and times[0] > 0 and times[-1] > times[0]
        assert told(kind, 0, axes, mesh) == 0
    for axes in AXES:
        scatter, gather = (
            told(kind, LARGE, axes, mesh) for kind in ("reduce-scatter", "all-gather")
        )
        copies = links_of(mesh, axes).kind == "memory"  # all the same bytes
        assert scatter == gather
        assert told("all-reduce", LARGE, axes, mesh) == pytest.approx(gather * (2 - copies))
        # An all-to-all gives each device as many bytes as it has; a gather of that many brings
        # them to all others, too.
        size = links_of(mesh, axes).size
        assert told("all-to-all", LARGE // size, axes, mesh) <= gather


def test_more_and_wrap_around_links_halve_it():
    mesh = topology("v5p:8x8x8").mesh((8, 64), ("a", "b"))
    one, two, three = (told("all-gather", LARGE, axes, mesh) for axes in AXES)
    assert two == pytest.approx(one / 2, rel=0.15) and three == pytest.approx(one / 3, rel=0.15)
    mesh = topology("v5e:8x16").mesh((8, 16), ("a", "b"))
    line, ring = (told("all-gather", LARGE, axes, mesh) * 1e-9 for axes in AXES[:2])
    assert line / ring == pytest.approx(2 * (7 / 8) / (15 / 16), rel=1e-3)
    # An all-to-all over a line of half the length crosses its middle as fast.
    line, ring = (told("all-to-all", LARGE, axes, mesh) for axes in AXES[:2])
    assert line == pytest.approx(ring, rel=1e-3)


def test_a_switch_exchanges_faster_than_a_torus():
    # Through a switch an all-to-all takes an n-th of a gather, round a ring a quarter.
    mesh = topology("gb200:18x4").mesh((72,), ("a",))
    gather = told("all-gather", LARGE, ("a",), mesh)
    assert told("all-to-all", LARGE // 72, ("a",), mesh) == pytest.approx(gather / 72, rel=0.1)
    mesh = topology("v5e:16x16").mesh((16, 16), ("a", "b"))
    gather = told("all-gather", LARGE, ("a",), mesh)
    quarter = gather / 4 * 16 / 15
    assert told("all-to-all", LARGE // 16, ("a",), mesh) == pytest.approx(quarter, rel=1e-2)


def test_over_slices_the_network_counts_and_each_chip_brings_its_part():
    mesh = topology("v5e:4*16x16").mesh((4, 256), ("a", "b"))
    alone = told("all-reduce", LARGE, ("a",), mesh)
    assert alone == pytest.approx(2 * LARGE * 3 / 4 / 3.125e9, rel=1e-3)
    assert told("all-reduce", LARGE, ("a", "b"), mesh) == pytest.approx(
        max(alone / 256, told("all-reduce", LARGE, ("b",), mesh)), rel=0.01
    )


@pytest.mark.parametrize(
    ("text", "shape", "axes", "kind", "sent", "published"),
    [
        # Scaling book, sharding, quiz 2: "3 * 8.4e6 / 4.5e10 = 560us".
        ("v5e:4x8", (8, 4), ("b",), "all-gather", 2048 * 8192 * 2, 560e-6),
        # The same, chapter on GPUs, quiz 2, question 3: "536e6 * (8 - 1) / 3.6e12 = 1.04ms".
        ("h100:1x8", (8, 1), ("a",), "all-gather", 4096 * 65536 * 2, 1.04e-3),
        # Its pop quiz 1: "more precisely, 65us".
        ("h100:1x8", (8, 1), ("a",), "all-gather", 2 * 1024 * 16384, 65e-6),
        # Its cross-node collectives: 413 GB/s for an all-gather over 32 hosts.
        ("h100:32x8", (32, 8), ("a", "b"), "all-gather", 2**36, 2**36 / 413e9),
        # Of N-way all-to-alls over M hosts: B (M - 1) / (M^2 W_node).
        ("h100:4x8", (4, 8), ("a", "b"), "all-to-all", 2**36 // 32, 2**36 * 3 / 16 / 400e9),
        # Of chapter 2, question 6: gather to a corner of a 4x4: 15e9 / (5e10 * 2), here at 4.5e10.
        ("v5e:4x4", (4, 4), ("a", "b"), "all-gather", 16 * 10**9, 15e9 / (4.5e10 * 2)),
        # NCCL's factor of an all-reduce: S 2 (n - 1) / (n B).
        ("h100:1x8", (8, 1), ("a",), "all-reduce", 2**32, 2**32 * 2 * 7 / (8 * 4.5e11)),
    ],
)
def test_published_numbers(text, shape, axes, kind, sent, published):
    mesh = topology(text).mesh(shape, ("a", "b"))
    assert told(kind, sent, axes, mesh) == pytest.approx(published, rel=0.06)
    # "Here's an actual profile which shows 680us": what was measured is what links reach.
    mesh = topology("v5e:4x8").mesh((8, 4), ("a", "b"))
    assert seconds("all-gather", 2048 * 8192 * 2, ("b",), mesh) == pytest.approx(680e-6, rel=0.02)
    assert LINKS_REACH == pytest.approx(370 / 450, rel=0.01)


def test_a_shift_goes_over_one_link():
    mesh = topology("v5e:16x16").mesh((16, 16), ("a", "b"))
    assert told("collective-permute", LARGE, ("a",), mesh) == pytest.approx(
        LARGE / 4.5e10, rel=0.01
    )
    mesh = topology("h100:4x8").mesh((4, 8), ("a", "b"))
    assert told("collective-permute", LARGE, ("a", "b"), mesh) == pytest.approx(
        LARGE / 5e10, rel=0.01
    )


def test_one_device_sends_nothing_and_starts_are_collectives():
    mesh = topology("v5e:4x4").mesh((1, 16), ("a", "b"))
    assert seconds("all-reduce", LARGE, ("a",), mesh) == 0
    whole = seconds("all-gather", LARGE, ("b",), mesh)
    assert seconds("all-gather-start", LARGE, ("b",), mesh) == whole
    with pytest.raises(ShardingError, match=r"'gossip' is not a collective: all-gather"):
        seconds("gossip", 1, ("a",), mesh)
