"""Machines by a text: sizes, hosts, slices, and what a wrong text is told."""

from __future__ import annotations

import os
import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.planner.costs.collective_times import seconds
from isoshard.planner.machine import measured_cpu
from isoshard.planner.machine.links import links, links_of
from isoshard.planner.machine.topologies import topology, topology_of
from tests import host


@pytest.mark.parametrize(
    ("text", "size", "hosts", "slices"),
    [
        ("v5e:2x4", 8, 1, 1),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:4*16x16", 1024, 256, 4),
        ("v6e:4x4", 16, 4, 1),
        ("v5p:2x2x1", 4, 1, 1),
        ("v5p:8x8x8", 512, 128, 1),
        ("h100:2x8", 16, 2, 1),
        ("h100:8", 8, 1, 1),
        ("gb200:6x4", 24, 6, 1),
        ("cpu:64", 64, 1, 1),
    ],
)
def test_sizes_and_hosts(text, size, hosts, slices):
    machine = topology(text)
    assert (machine.size, machine.hosts, machine.slices) == (size, hosts, slices)
    assert machine.name == text and topology(text) is machine
    devices = machine.devices
    assert [device.id for device in devices] == list(range(size))
    assert len({device.process_index for device in devices}) == hosts
    assert len({(device.slice_index, device.coords) for device in devices}) == size


def test_wrap_around_links():
    assert topology("v5e:16x16").wraps == (True, True)
    assert topology("v5e:8x16").wraps == (False, True)
    assert topology("v5p:4x4x8").wraps == (True, True, True)
    assert topology("v5p:2x4x4").wraps == (False, False, False)
    assert topology("h100:2x8").wraps == (False, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "'v5e' is not a topology: write a chip and its grid, such as 'v5e:16x16'"),
        ("v5e:4x", "'v5e:4x' is not a topology"),
        ("v7:2x2", "there is no chip 'v7'; there are a100"),
        ("v5e:0x4", "'v5e:0x4' has no devices: every size is at least 1"),
        ("v5e:16x8", "no slice of 16x8 v5e; there are 1x1, 2x2, .*16x16. Did you mean v5e:8x16?"),
        ("v5e:32x32", "1024 chips are more than one slice has: join slices, as in 'v5e:2*16x16'"),
        ("v5e:2x2x2", "v5e is wired as a torus of 2 axes, and 2x2x2 has 3"),
        ("v5p:8x8", "v5p is wired as a torus of 3 axes, and 8x8 has 2; .*v5p:8x8x8"),
        ("v5p:4x4x6", "whole cubes: three multiples of 4 with at most 6144 chips"),
        ("v4:16x16x32", "8192 chips are more than one slice has"),
        ("h100:2x16", "a host has 8 h100, of which a job takes 1, 2, 4, 8, not 16"),
        ("h100:2x2x8", "a machine of h100 is hosts x GPUs of one"),
        ("h100:2*2x8", "slices are of TPUs; GPUs of all hosts are joined by one network"),
        ("gb200:36x4", "one switch joins 18 hosts of gb200 at most, .*'gb200:2x18x4'"),
        ("cpu:2x4", "devices of a CPU have no grid, only a count: write 'cpu:8'"),
    ],
)
def test_what_cannot_be_had_is_told_with_what_can(text, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ShardingError, match=pattern):
        topology(text)


def test_a_host_is_measured_once_and_outside_of_what_is_traced(monkeypatch):
    """On two devices and with small arrays: all of it takes half a minute."""
    small = {"_AT_WORK": 2, "_SIDE": 64, "_CHANGED": 2**20, "_SENT": 2**16, "KEPT": 2**20}
    for name, size in (small | {"_TURNS": 4, "_WIDTH": 32, "_NARROW": 8}).items():
        monkeypatch.setattr(measured_cpu, name, size)
    traced = []
    jax.make_jaxpr(lambda x: (traced.append(host.measured()), x)[1])(1.0)
    [rates] = traced
    assert host.measured() is rates
    assert rates.cores == os.cpu_count() and rates.memory > 2**30
    assert min(rates.flops, rates.bandwidth, rates.reordered, rates.between) > 0
    assert 0 <= rates.fresh < float("inf")
    assert sorted(rates.meetings) == sorted(rates.waits) == [2] and rates.meetings[2] > 0
    assert len(rates.copied) == 5
    assert all(list(sizes) == [2] and sizes[2] > 0 for sizes in rates.copied.values())


def test_devices_that_are_here_have_the_rates_of_this_host():
    mesh = make_mesh((2, 4), ("a", "b"))
    machine = topology_of(mesh)
    assert machine is topology_of(mesh) and machine.name == "cpu:8"
    assert machine.chip.rate("float32") == host.RATES.flops / 8
    assert machine.chip.memory == host.RATES.memory // 8
    assert topology_of(make_mesh((4,), ("a",))).chip.rate("float32") == host.RATES.flops / 4
    rates = host.RATES
    assert seconds("all-gather", 8, ("a",), mesh) == pytest.approx(
        64 / rates.copied["all-gather"][2] + rates.meetings[2]
    )
    assert machine.chip.reordered == rates.reordered / 8
    assert links(mesh)["a"].latency == rates.meetings[2]
    assert links_of(mesh, ("a", "b")).latency == rates.meetings[8]
    assert topology("cpu:8").chip.rate("float32") == 5e10


class Present:
    """A device as a TPU's or GPU's client gives it."""

    def __init__(self, client, kind, place, part, host):
        self.client, self.device_kind, self.coords = client, kind, place
        self.platform = "tpu" if "TPU" in kind else "gpu"
        self.slice_index, self.process_index, self.core_on_chip = part, host, 0
        self.id = len(client.found)
        client.found.append(self)


def present(kind, places, parts=1, per_host=4):
    client = types.SimpleNamespace(found=[])
    client.devices = lambda: client.found
    for part in range(parts):
        for number, place in enumerate(places):
            Present(client, kind, place, part, part * len(places) + number // per_host)
    return np.array(client.found, object)


def test_devices_that_are_here_are_found_by_their_kind():
    devices = present("TPU v5 lite", [(x, y, 0) for x in range(8) for y in range(16)], parts=2)
    mesh = Mesh(devices.reshape(2, 8, 16), ("a", "b", "c"))
    machine = topology_of(mesh)
    assert (machine.name, machine.shape, machine.slices) == ("v5e:2*8x16", (8, 16), 2)
    found = links(mesh)
    assert [found[name].kind for name in "abc"] == ["dcn", "ici", "ici"]
    assert (found["b"].ring, found["c"].ring) == (False, True)
    gpus = present("NVIDIA H100 80GB HBM3", [None] * 8, parts=2, per_host=1)
    mesh = Mesh(gpus.reshape(2, 8), ("a", "b"))
    assert (topology_of(mesh).name, topology_of(mesh).size) == ("h100:2x8", 16)
    assert [one.kind for one in links(mesh).values()] == ["network", "nvlink"]


def test_devices_of_no_known_kind_say_what_to_do():
    mesh = Mesh(present("NVIDIA T4", [None]), ("a",))
    with pytest.raises(ShardingError, match=r"kind 'NVIDIA T4'; there are .*add_chip"):
        topology_of(mesh)
