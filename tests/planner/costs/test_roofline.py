"""Seconds of a step: flops or bytes, loops, overlap, utilisation, and the timeline."""

from __future__ import annotations

import dataclasses
import math

import pytest

from isoshard.core.errors import ShardingError
from isoshard.planner.costs.collective_times import seconds
from isoshard.planner.costs.device_program import DeviceOp, DeviceProgram
from isoshard.planner.costs.roofline import (
    COMPUTE_REACH,
    MEMORY_REACH,
    MOST_EVENTS,
    grouped,
    time_of,
)
from isoshard.planner.machine import chips
from isoshard.planner.machine.topologies import topology, topology_of
from isoshard.planner.reports.report import MemoryEstimate, TimelineEvent

NOTHING = MemoryEstimate(0, 0, 0, 0, 0, 0, "", (), 0)
MESH = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
CHIP = topology("v5e:16x16").chip
RATE = CHIP.rate("bfloat16") * COMPUTE_REACH["tpu"]
MOVED = CHIP.bandwidth * MEMORY_REACH["tpu"]


def dot(flops, moved=0.0, **options):
    return DeviceOp(
        "dot_general", options.pop("line", "a.py:1 (f)"), flops, moved, "bfloat16", **options
    )


def gather(sent, **options):
    axes = options.pop("axes", ("model",))
    return DeviceOp("all-gather", "b.py:2 (g)", dtype="bfloat16", axes=axes, sent=sent, **options)


def estimate(*ops, mesh=MESH):
    return time_of(DeviceProgram(ops, NOTHING), mesh)


def test_an_operation_takes_the_longer_of_flops_and_bytes():
    time, _ = estimate(dot(RATE, MOVED / 2), dot(RATE / 4, MOVED))
    assert (time.compute, time.memory) == pytest.approx((1.25, 1.5))
    assert time.busy == time.serial == time.overlapped == pytest.approx(2.0)
    assert time.limit == "memory" and time.collectives == {}
    wide = DeviceOp("dot_general", "", 1e15, 0.0, "int8")  # dtypes have rates of their own
    assert estimate(wide)[0].busy < estimate(dot(1e15))[0].busy
    loop, _ = estimate(dot(1e12, times=7, scope=1))
    assert loop.serial == pytest.approx(estimate(*[dot(1e12)] * 7)[0].serial)
    nothing, timeline = estimate()
    assert (nothing.serial, nothing.utilisation, timeline) == (0, 0, ())


def test_collectives_of_a_loop_hide_behind_its_computing_all_but_the_first():
    one = seconds("all-gather", 10**9, ("model",), MESH)
    long = dot(2 * one * RATE, times=8, scope=1)
    time, _ = estimate(gather(10**9, times=8, scope=1), long)
    assert time.serial == pytest.approx(24 * one)
    assert time.overlapped == pytest.approx(17 * one)
    short = dot(one / 2 * RATE, times=8, scope=1)
    time, _ = estimate(gather(10**9, times=8, scope=1), short)
    assert time.overlapped == pytest.approx(8 * one)
    assert time.limit == "model"


def test_collectives_that_wait_for_the_loop_are_exposed():
    one = seconds("all-gather", 10**9, ("model",), MESH)
    long = dot(2 * one * RATE, times=8, scope=1)
    time, _ = estimate(gather(10**9, times=8, scope=1, waits=True), long)
    assert time.overlapped == pytest.approx(time.serial) == pytest.approx(24 * one)
    time, _ = estimate(
        gather(10**9, times=8, scope=1, waits=True), gather(10**9, times=8, scope=1), long
    )
    assert time.overlapped == pytest.approx((16 + 8 + 1) * one)


def test_collectives_outside_of_loops_are_exposed():
    time, _ = estimate(gather(10**9), dot(1e15))
    assert time.overlapped == time.serial > time.busy
    apart, _ = estimate(gather(10**9), dot(1e15, times=4, scope=1))
    assert apart.overlapped == apart.serial
    one = seconds("all-gather", 10**9, ("model",), MESH)  # loops overlap each by itself
    time, _ = estimate(gather(10**9, times=4, scope=1), dot(8 * one * RATE, times=4, scope=2))
    assert time.overlapped == pytest.approx(time.serial)


def test_collectives_are_summed_by_axes_in_the_order_of_the_mesh():
    time, _ = estimate(gather(10**9), gather(10**9, times=2), gather(10**9, axes=("model", "data")))
    assert list(time.collectives) == ["model", "data+model"]
    assert time.collectives["model"] == pytest.approx(
        3 * seconds("all-gather", 10**9, ("model",), MESH)
    )
    assert time.limit == "model"


def test_assumptions_are_told_in_words():
    time, _ = estimate(dot(1e12))
    told = " ".join(time.assumptions)
    assert time.utilisation == pytest.approx(COMPUTE_REACH["tpu"])
    assert "95% of the peak" in told and "82% of their links" in told
    assert "all but those of its first iteration" in told and "rates of v5e: https" in told


def test_the_timeline_is_the_step_in_order_without_overlap():
    ops = (
        dot(1e12, live=5),
        dot(1e12, live=9),
        gather(10**9, live=7),
        dot(1e12, line="c.py:3 (h)"),
    )
    time, timeline = estimate(*ops)
    assert [event.what for event in timeline] == ["compute", "all-gather", "compute"]
    assert [event.memory for event in timeline] == [9, 7, 0]
    assert [event.line for event in timeline] == ["a.py:1 (f)", "b.py:2 (g)", "c.py:3 (h)"]
    assert timeline[1].axes == ("model",) and timeline[1].start == timeline[0].seconds
    assert math.fsum(event.seconds for event in timeline) == pytest.approx(time.serial)


@pytest.mark.parametrize("count", [10, 2000])
def test_a_long_timeline_is_grouped_and_takes_as_long(count):
    ops = []
    for number in range(count):
        ops += [dot(1e12, line=f"a.py:{number} (f)"), gather(10**8), gather(10**8, axes=("data",))]
    time, timeline = estimate(*ops)
    assert len(timeline) <= MOST_EVENTS
    assert math.fsum(event.seconds for event in timeline) == pytest.approx(time.serial)
    starts = [event.start for event in timeline]
    assert starts == sorted(starts) and starts[0] == 0
    assert {event.what for event in timeline} == {"compute", "all-gather"}
    events = [TimelineEvent("compute", (), 0.0, 1.0, 1, "short")]
    events += [TimelineEvent("compute", (), 0.0, 5.0, 1, "long"), events[0]]
    (found,) = grouped(events, most=1)  # has the line that most of it comes from
    assert (found.line, found.seconds) == ("long", 7.0)


def test_a_collective_along_no_axis_of_the_mesh():
    with pytest.raises(ShardingError, match=r"there is no axis z; the mesh has data, model"):
        estimate(gather(1, axes=("z",)))


def test_virtual_devices_wait_for_the_last_that_comes_from_work(monkeypatch):
    monkeypatch.setattr(chips, "_CHIPS", {**chips._CHIPS})
    waits, meetings = {2: 1e-3, 4: 3e-3, 8: 5e-3}, {2: 1e-4, 4: 2e-4}
    chips.add_chip(
        dataclasses.replace(
            chips.chip("cpu"), name="met", waits=waits, meetings=meetings, between=0.01
        )
    )
    mesh = topology("met:8").mesh((2, 4), ("data", "model"))
    sent = math.ceil(mesh.size * 1000)

    def of(seconds_of_work, *axes):
        work = dot(seconds_of_work * topology_of(mesh).chip.rate("bfloat16"))
        ops = [op for one in axes for op in (work, gather(sent, axes=one))]
        time, _ = estimate(*ops, mesh=mesh)
        assert time.assumptions[-1].endswith("wait for the last of them, 8 devices up to 5 ms")
        return sum(time.collectives.values())

    bare = of(0.0, ("data",)), of(0.0, ("model",))
    assert bare[1] - bare[0] == pytest.approx(1e-4)  # four meet, not two
    assert of(0.005, ("data",)) - bare[0] == pytest.approx(0.5e-3)  # half of `between`
    assert of(1.0, ("model",)) - bare[1] == pytest.approx(3e-3)  # as long as it was measured
    both = of(0.005, ("data",), ("model",))  # half of `between` before each; the second joins all
    assert both - sum(bare) == pytest.approx(0.5e-3 + 2.5e-3)
    work = dot(0.005 * topology_of(mesh).chip.rate("bfloat16"))
    twice, _ = estimate(work, *[gather(sent, axes=("data",))] * 2, mesh=mesh)
    assert sum(twice.collectives.values()) - 2 * bare[0] == pytest.approx(0.5e-3)  # met just before
