"""What mesh axes run on: rings and lines of a torus, NVLink, networks, odd orders."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.planner.machine.links import Way, links, links_of
from isoshard.planner.machine.topologies import topology


def axes_of(text, shape, *names):
    return links(topology(text).mesh(shape, names))


def test_a_ring_of_sixteen_sends_both_ways_and_a_shorter_line_one():
    found = axes_of("v5e:8x16", (8, 16), "a", "b")
    assert found["a"].levels[0].ways == (Way(8, False),) and not found["a"].ring
    assert found["b"].levels[0].ways == (Way(16, True),) and found["b"].ring
    assert (found["a"].bandwidth, found["b"].bandwidth) == (4.5e10, 9e10)
    assert found["a"].latency == pytest.approx(7e-6) and found["b"].latency == pytest.approx(8e-6)
    smaller = axes_of("v5e:16x16", (8, 8), "a", "b")
    assert not smaller["a"].ring and not smaller["b"].ring
    assert axes_of("v5e:4x4", (16,), "a")["a"].levels[0].ways == (Way(4, False), Way(4, False))


def test_axes_together_have_the_links_of_all():
    mesh = topology("v5p:8x8x8").mesh((8, 64), ("a", "b"))
    assert links(mesh)["b"].bandwidth == 2 * links(mesh)["a"].bandwidth
    both = links_of(mesh, ("b", "a"))
    assert both.axes == ("a", "b") and both.size == 512
    assert both.bandwidth == 3 * links(mesh)["a"].bandwidth


def test_part_of_an_axis_is_a_line_and_the_rest_shares_its_links():
    found = axes_of("v5e:16x16", (16, 4, 4), "a", "b", "c")
    assert found["c"].levels[0].ways == (Way(4, False),)
    assert found["b"].levels[0].ways == (Way(4, True, 4),)
    assert found["b"].bandwidth == found["a"].bandwidth / 4
    assert found["b"].note == "its chips are 4 apart on an axis, whose links 4 groups share"
    assert "4 apart" in str(found["b"]) and found["a"].note == found["c"].note == ""


def test_slices_are_joined_by_their_network():
    found = axes_of("v5e:4*16x16", (64, 16), "a", "b")
    assert [level.kind for level in found["a"].levels] == ["ici", "dcn"]
    assert [level.size for level in found["a"].levels] == [16, 4]
    assert (found["a"].kind, found["b"].kind) == ("dcn", "ici")
    assert found["a"].bandwidth == 3.125e9
    only = axes_of("v5e:4*16x16", (4, 256), "a", "b")["a"]
    assert [level.kind for level in only.levels] == ["dcn"]


def test_gpus_of_a_host_and_hosts():
    found = axes_of("h100:2x8", (4, 4), "a", "b")
    assert [(level.kind, level.size) for level in found["a"].levels] == [
        ("nvlink", 2),
        ("network", 2),
    ]
    assert (found["a"].bandwidth, found["b"].bandwidth) == (5e10, 4.5e11)
    assert found["b"].inside_host and not found["a"].inside_host


def test_devices_of_a_cpu_copy_in_memory():
    found = links(make_mesh((2, 4), ("a", "b")))
    assert found["a"].kind == found["b"].kind == "memory"
    assert found["a"].inside_host and found["a"].bandwidth > 0
    assert axes_of("cpu:8", (2, 4), "a", "b")["b"].bandwidth == 5e9


def test_devices_in_no_order_share_links_and_it_says_so():
    devices = np.array(topology("v5e:4x4").devices, object)
    np.random.default_rng(0).shuffle(devices)
    found = links(Mesh(devices.reshape(4, 4), ("a", "b")))
    ordered = axes_of("v5e:4x4", (4, 4), "a", "b")
    for name in "ab":
        assert "not a block of the grid; their messages share each link" in found[name].note
        assert found[name].bandwidth < ordered[name].bandwidth


def test_an_axis_that_is_not_there():
    with pytest.raises(ShardingError, match=r"there is no axis z; the mesh has a, b"):
        links_of(topology("v5e:4x4").mesh((4, 4), ("a", "b")), ("z",))
