"""Along which axes devices differ: through collectives, fusions, branches and loops."""

from __future__ import annotations

import pytest

from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.programs.hlo_text import parsed
from isoshard.core.planner.programs.varying_axes import varying_axes

MESH = topology("v5e:2x2").mesh((2, 2), ("data", "model"))
ALONG = {"data": "{{0,2},{1,3}}", "model": "{{0,1},{2,3}}"}


def axes(text, name, given):
    (found,) = varying_axes(parsed(text), MESH, given)[name]
    return sorted(found)


@pytest.mark.parametrize(
    ("kind", "along", "given", "after"),
    [
        ("all-gather", "model", ("data", "model"), ["data"]),
        ("all-reduce", "data", ("data", "model"), ["model"]),
        ("reduce-scatter", "data", ("model",), ["data", "model"]),
        ("all-to-all", "model", ("model",), ["model"]),
    ],
)
def test_what_talks_agrees_or_differs(kind, along, given, after):
    text = f"""
HloModule step
ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %y = f32[4]{{0}} {kind}(%x), replica_groups={ALONG[along]}
}}"""
    assert axes(text, "y", [given]) == after


def test_a_permute_leaves_devices_different():
    text = """
HloModule step
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
}"""
    assert axes(text, "y", [("model",)]) == ["model"]


LOOP = """
HloModule step

%fused (a: f32[4], b: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  ROOT %s = f32[4]{0} add(%a, %b)
}

%body (c: (f32[4], f32[4], f32[4])) -> (f32[4], f32[4], f32[4]) {
  %c = (f32[4], f32[4], f32[4]) parameter(0)
  %first = f32[4]{0} get-tuple-element(%c), index=0
  %second = f32[4]{0} get-tuple-element(%c), index=1
  %kept = f32[4]{0} get-tuple-element(%c), index=2
  %next = f32[4]{0} fusion(%first, %second), kind=kLoop, calls=%fused
  ROOT %t = (f32[4], f32[4], f32[4]) tuple(%next, %kept, %kept)
}

%test (c: (f32[4], f32[4], f32[4])) -> pred[] {
  %c.1 = (f32[4], f32[4], f32[4]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[4], y: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %zero = f32[4]{0} constant({0,0,0,0})
  %start = (f32[4], f32[4], f32[4]) tuple(%zero, %x, %y)
  %loop = (f32[4], f32[4], f32[4]) while(%start), condition=%test, body=%body
  %left = f32[4]{0} get-tuple-element(%loop), index=0
  %untouched = f32[4]{0} get-tuple-element(%loop), index=2
  ROOT %sum = f32[4]{0} add(%left, %untouched)
}"""


def test_what_differs_after_two_runs_of_a_loop_differs_in_it():
    given = [("data",), ("model",)]
    assert axes(LOOP, "zero", given) == []
    assert axes(LOOP, "untouched", given) == ["model"]
    assert axes(LOOP, "left", given) == ["data", "model"]
    assert axes(LOOP, "first", given) == ["data", "model"]


def test_a_branch_differs_as_what_chooses_it():
    text = """
HloModule step

%one (a: f32[4]) -> f32[4] {
  ROOT %a = f32[4]{0} parameter(0)
}

%other (b: f32[4]) -> f32[4] {
  ROOT %b = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], n: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %n = s32[] parameter(1)
  %id = u32[] partition-id()
  ROOT %y = f32[4]{0} conditional(%n, %x, %x), branch_computations={%one, %other}
}"""
    assert axes(text, "y", [("data",), ("model",)]) == ["data", "model"]
    assert axes(text, "id", [(), ()]) == ["data", "model"]
