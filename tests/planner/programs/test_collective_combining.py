"""Collectives that compilers send as one: which, up to what size, and what is left of them."""

from __future__ import annotations

import pytest

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.device_ops import device_ops

MESH = topology("v5e:2x2").mesh((2, 2), ("data", "model"))

TEXT = """
HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%most (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %m = f32[] maximum(%a, %b)
}

ENTRY %main (p: f32[1024], q: f32[2048], r: f32[SIZE]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %q = f32[2048]{0} parameter(1)
  %r = f32[SIZE]{0} parameter(2)
  %x = f32[1024]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, LINE1
  %y = f32[2048]{0} all-reduce(%q), replica_groups={{0,1},{2,3}}, to_apply=%add, LINE2
  %z = f32[SIZE]{0} all-reduce(%r), replica_groups={{0,1},{2,3}}, to_apply=%add, LINE3
  ROOT %all = (f32[1024]{0}, f32[2048]{0}, f32[SIZE]{0}) tuple(%x, %y, %z)
}
"""
MIB = 2**20


def found(text, target="tpu", **more):
    ops = device_ops(parsed(text), MESH, {}, target=target, **more)
    return [(op.name, op.axes, op.sent, op.line) for op in ops if op.is_collective]


def sized(size):
    text = TEXT.replace("SIZE", str(size))
    for line in (1, 2, 3):
        text = text.replace(f"LINE{line}", f'metadata={{op_name="a.py:{line} (f)/sum"}}')
    return text


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_what_waits_for_nothing_is_one_with_the_line_of_the_largest(target):
    whole = 4 * (1024 + 2048 + 512)
    assert found(sized(512), target) == [("all-reduce", ("model",), whole, "a.py:2 (f)")]
    assert len(found(sized(512), target, joining=False)) == 3


@pytest.mark.parametrize(("target", "most"), [("tpu", 120 * MIB), ("gpu", 30 * MIB)])
def test_together_they_have_a_largest_size(target, most):
    rest = most - 4 * (1024 + 2048)
    assert len(found(sized(rest // 4), target)) == 1
    first, second = found(sized(rest // 4 + 2), target)
    assert (first[2], second[2]) == (4 * (1024 + 2048), rest + 8)


def test_one_that_needs_another_is_on_its_own():
    chained = sized(1024).replace("all-reduce(%r)", "all-reduce(%x)")
    assert [one[2] for one in found(chained)] == [4 * (1024 + 2048), 4 * 1024]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%q), replica_groups={{0,1},{2,3}}", "%q), replica_groups={{0,2},{1,3}}"),
        ("%q), replica_groups={{0,1},{2,3}}, to_apply=%add", "%q), {same}, to_apply=%most"),
        ("f32[2048]", "bf16[2048]"),
    ],
)
def test_only_what_does_the_same_is_one(old, new):
    new = new.replace("{same}", "replica_groups={{0,1},{2,3}}")
    assert len(found(sized(512).replace(old, new))) == 2


def test_a_tpu_joins_sums_only():
    gathers = sized(512).replace("all-reduce(", "all-gather(")
    gathers = gathers.replace("to_apply=%add", "dimensions={0}")
    assert len(found(gathers)) == 3
    assert len(found(gathers, "gpu")) == 1


def test_a_target_that_is_not_modelled_joins_nothing():
    assert len(found(sized(512), "")) == 3
