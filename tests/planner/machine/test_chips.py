"""The table of chips: every entry has a source and sensible rates; a user adds one in a line."""

from __future__ import annotations

import dataclasses

import pytest

from isoshard.core.errors import ShardingError
from isoshard.planner.machine import chips
from isoshard.planner.machine.chips import Chip, add_chip, chip, chip_of_kind
from isoshard.planner.machine.topologies import topology

NAMES = ("v4", "v5e", "v5p", "v6e", "a100", "h100", "h200", "b200", "gb200", "cpu")


@pytest.fixture
def own_table(monkeypatch):
    monkeypatch.setattr(chips, "_CHIPS", dict(chips._CHIPS))


@pytest.mark.parametrize("name", NAMES)
def test_every_chip_has_rates_and_a_page_they_are_from(name):
    one = chip(name)
    assert one.rate("bfloat16") >= one.rate("float32") > 0
    assert one.memory > 1e9 and one.bandwidth > one.link > 0
    assert name == "cpu" or one.source.startswith("https://")
    assert chip_of_kind(one.kind) is one


def test_intensities_are_those_of_the_pages():
    # "TPU v5e: 240 flops a byte"; NVIDIA: 989 TFLOP/s over 3.35 TB/s.
    assert chip("v5e").rate("bfloat16") / chip("v5e").bandwidth == pytest.approx(240, rel=0.01)
    assert chip("h100").rate("float16") / chip("h100").bandwidth == pytest.approx(295, rel=0.01)


def test_dtypes_go_by_the_rate_of_their_kind():
    h100, v5e = chip("h100"), chip("v5e")
    assert h100.rate("float8_e5m2") == h100.rate("int8") == 1.979e15
    assert v5e.rate("float8_e4m3fn") == v5e.rate("float16") == v5e.rate("bfloat16")
    assert v5e.rate("int4") == v5e.rate("int8") > v5e.rate("bfloat16")
    assert h100.rate("float64") == 6.7e13 and v5e.rate("float64") == v5e.rate("float32") / 2
    assert h100.rate("bool") == h100.rate("int32") == h100.rate("float32")


def test_one_line_adds_a_chip(own_table):
    add_chip(dataclasses.replace(chip("h100"), name="slow", flops={"float32": 1e12}))
    machine = topology("slow:2x8")
    assert machine.chip.rate("bfloat16") == 1e12 and machine.hosts == 2
    add_chip(dataclasses.replace(chip("slow"), memory=1))
    assert topology("slow:2x8").chip.memory == 1
    rates = {"float32": 1e12}  # and a torus of one's own may have any grid
    add_chip(Chip("ring", "Ring", "tpu", rates, 10**9, 1e12, 1e10, 1, 1, 1e9, 1e-6, "me"))
    assert topology("ring:5").size == 5


def test_a_chip_that_is_not_there_says_which_are():
    with pytest.raises(ShardingError, match=r"no chip 'v9'; there are a100, .*v6e\. Add it with"):
        chip("v9")
    with pytest.raises(ShardingError, match=r"devices of kind 'TPU v9'; .*Chip\(NAME, 'TPU v9'"):
        chip_of_kind("TPU v9")


def test_a_chip_without_float32_is_refused(own_table):
    with pytest.raises(ShardingError, match=r"'odd' has rates for int8: add one for float32"):
        add_chip(dataclasses.replace(chip("v5e"), name="odd", flops={"int8": 1.0}))
