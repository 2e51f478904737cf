"""Tensor parallelism over more devices than heads: the report says where heads are split."""

from __future__ import annotations

from benchmarks.planning_models import llama
from isoshard.core.plan import Plan
from isoshard.planner.estimating import estimate
from isoshard.planner.machine.topologies import topology
from isoshard.planner.reports.report import Report

SIZE = {"width": 384, "inner": 1024, "vocabulary": 512, "batch": 8, "length": 128}


def report(heads: int, kv_heads: int, shape: tuple[int, int], **options) -> Report:
    family = llama(layers=2, heads=heads, kv_heads=kv_heads, **SIZE)
    mesh = topology("v5e:4x4").mesh(shape, ("data", "model"))
    plan = Plan.data_parallel("data") * Plan.tensor_parallel("model")
    return estimate(family.step, family.args, mesh, plan, **options)


def test_fewer_heads_of_keys_than_devices():
    (said,) = [one for one in report(8, 2, (2, 8), repeats=True).advice if "heads" in one]
    assert said.startswith("2 heads of 48 are split over 8 devices ('model') at ")
    assert said.count("planning_models.py:") >= 2  # keys, values
    assert ": each lies in 4 parts, which are gathered where heads are needed whole; " in said
    assert said.endswith("a number of devices that divides 2 keeps them whole")


def test_heads_that_devices_do_not_divide():
    (said,) = [one for one in report(12, 12, (2, 8)).advice if "heads" in one]
    assert said.startswith("12 heads of 32 are split over 8 devices ('model') at ")
    assert ": some lie in parts, " in said


def test_heads_that_stay_whole_are_not_spoken_of():
    assert not [one for one in report(8, 8, (2, 8)).advice if "heads" in one]
