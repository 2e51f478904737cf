"""Collectives of collectives: one at the compiler, two at the partitioner."""

from __future__ import annotations

import pytest

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.collective_rewrites import fold_chained
from isoshard.planner.programs.device_ops import device_ops

MESH = topology("v5e:2x2").mesh((2, 2), ("data", "model"))
CHAINS = """
HloModule m, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%most (x1: f32[], y1: f32[]) -> f32[] {
  %x1 = f32[] parameter(0)
  %y1 = f32[] parameter(1)
  ROOT %s1 = f32[] maximum(%x1, %y1)
}

%copied (c: f32[4,16]) -> f32[4,16] {
  %c = f32[4,16]{0,1} parameter(0)
  ROOT %d = f32[4,16]{1,0} copy(%c)
}

ENTRY %main (p: f32[4,8]) -> (f32[8,16], f32[4,8]) {
  %p = f32[4,8]{1,0} parameter(0)
  %g = f32[4,16]{0,1} all-gather(%p), replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={1}
  %f = f32[4,16]{1,0} fusion(%g), kind=kLoop, calls=%copied
  %h = f32[8,16]{1,0} all-gather(%f), replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}
  %r = f32[4,8]{1,0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add
  %t = f32[4,8]{1,0} all-reduce(%r), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  ROOT %all = (f32[8,16]{1,0}, f32[4,8]{1,0}) tuple(%h, %t)
}
"""
GATHERED = [("all-gather", ("model",), 256), ("all-gather", ("data",), 512)]
REDUCED = [("all-reduce", ("model",), 128), ("all-reduce", ("data",), 128)]


def sent(text, target):
    ops = device_ops(fold_chained(parsed(text), target), MESH, {}, target=target)
    return [(op.name, op.axes, op.sent) for op in ops if op.is_collective]


def test_tpus_gather_and_sum_along_both_axes_at_once():
    both = ("data", "model")
    assert sent(CHAINS, "tpu") == [("all-gather", both, 512), ("all-reduce", both, 128)]


def test_gpus_sum_along_both_axes_at_once_and_gather_one_after_the_other():
    assert sent(CHAINS, "gpu") == [*GATHERED, ("all-reduce", ("data", "model"), 128)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("T(1,0), to_apply=%add", "T(1,0), to_apply=%most"),
        ("tuple(%h, %t)", "tuple(%h, %t, %r)"),
        ("all-reduce(%r)", "all-reduce(%n)"),
    ],
    ids=["another reduction", "read by others", "something between"],
)
def test_chains_that_are_none_stay(old, new):
    text = CHAINS.replace(old, new)
    if "%n" in new:
        text = text.replace("  %t =", "  %n = f32[4,8]{1,0} negate(%r)\n  %t =")
    assert sent(text, "gpu") == [*GATHERED, *REDUCED]
