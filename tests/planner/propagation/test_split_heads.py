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
    (advice,) = [text for text in report(8, 2, (2, 8), repeats=True).advice if "heads" in text]
    assert advice.startswith("2 heads of 48 are split over 8 devices ('model') at ")
    assert advice.count("planning_models.py:") >= 2  # keys, values
    assert ": each is split in 4, and gathered where an operation reads full heads; " in advice
    assert advice.endswith("a number of devices that divides 2 keeps heads unsplit")


def test_heads_that_devices_do_not_divide():
    (advice,) = [text for text in report(12, 12, (2, 8)).advice if "heads" in text]
    assert advice.startswith("12 heads of 32 are split over 8 devices ('model') at ")
    assert ": some are split, " in advice


def test_unsplit_heads_need_no_advice():
    assert not [text for text in report(8, 8, (2, 8)).advice if "heads" in text]
