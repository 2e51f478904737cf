"""What collectives wait for on a GPU, where a kernel has several results."""

from __future__ import annotations

import pytest

from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.programs.device_ops import device_ops
from isoshard.core.planner.programs.hlo_text import parsed
from isoshard.core.planner.programs.kernel_waits import waits

MESH = topology("h100:1x8").mesh((8,), ("data",))

SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""

LOSS = (
    SUM
    + """
%exps (p: f32[8,64], m: f32[8]) -> f32[8] {
  %p = f32[8,64]{1,0} parameter(0)
  %m = f32[8]{0} parameter(1)
  %n = f32[8,64]{1,0} broadcast(%m), dimensions={0}
  %d = f32[8,64]{1,0} subtract(%p, %n)
  %e = f32[8,64]{1,0} exponential(%d)
  %z = f32[] constant(0)
  ROOT %r = f32[8]{0} reduce(%e, %z), dimensions={1}, to_apply=%add
}

%picks (p: f32[8,64], l: s32[8]) -> f32[8] {
  %p = f32[8,64]{1,0} parameter(0)
  %l = s32[8]{0} parameter(1)
  %k = s32[8,64]{1,0} broadcast(%l), dimensions={0}
  %i = s32[8,64]{1,0} iota(), iota_dimension=1
  %q = pred[8,64]{1,0} compare(%i, %k), direction=EQ
  %z = f32[] constant(0)
  %y = f32[8,64]{1,0} broadcast(%z), dimensions={}
  %s = f32[8,64]{1,0} select(%q, %p, %y)
  ROOT %r = f32[8]{0} reduce(%s, %z), dimensions={1}, to_apply=%add
}

%slopes (p: f32[8,64], l: s32[8], t: f32[8]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %l = s32[8]{0} parameter(1)
  %t = f32[8]{0} parameter(2)
  %u = f32[8,64]{1,0} broadcast(%t), dimensions={0}
  %e = f32[8,64]{1,0} divide(%p, %u)
  %k = s32[8,64]{1,0} broadcast(%l), dimensions={0}
  %f = f32[8,64]{1,0} convert(%k)
  ROOT %s = f32[8,64]{1,0} subtract(%e, %f)
}

ENTRY %main (x: f32[8,8], w: f32[8,64], l: s32[8]) -> (f32[8], f32[8,64]) {
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,64]{1,0} parameter(1)
  %l = s32[8]{0} parameter(2)
  %m = f32[8]{0} constant({...})
  %logits = f32[8,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %exp = f32[8]{0} fusion(%logits, %m), kind=kLoop, calls=%exps
  %total = f32[8]{0} all-reduce(%exp), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %pick = f32[8]{0} fusion(%logits, %LABELS), kind=kLoop, calls=%picks
  %picked = f32[8]{0} all-reduce(%pick), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %slope = f32[8,64]{1,0} fusion(%logits, %l, %total), kind=kLoop, calls=%slopes
  ROOT %all = (f32[8]{0}, f32[8,64]{1,0}) tuple(%picked, %slope)
}
"""
)

UPDATE = (
    SUM
    + """
%keep (p: f32[8,64], q: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %q = f32[8,64]{1,0} parameter(1)
  %h = f32[8,64]{1,0} multiply(%p, %p)
  ROOT %r = f32[8,64]{1,0} add(%h, %q)
}

%half (p: f32[8,64]) -> bf16[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %c = f32[8,64]{0,1} copy(%p)
  ROOT %r = bf16[8,64]{0,1} convert(%c)
}

ENTRY %main (w: f32[8,64], m: f32[8,64], g: f32[8,64], x: bf16[8,512]) -> (f32[8,64], f32[8,64]) {
  %w = f32[8,64]{1,0} parameter(0)
  %m = f32[8,64]{1,0} parameter(1)
  %g = f32[8,64]{1,0} parameter(2)
  %x = bf16[8,512]{1,0} parameter(3)
  %turned = bf16[8,64]{0,1} fusion(%w), kind=kLoop, calls=%half
  %ahead = bf16[8,512]{0,1} all-gather(%turned), dimensions={1}, replica_groups={{0,1,2,3,4,5,6,7}}
  %loss = bf16[8,512]{1,0} multiply(%ahead, %x)
  %slope = f32[8,64]{1,0} slice(%loss), slice={[0:8], [0:64]}
  %sum = f32[8,64]{1,0} all-reduce(%slope), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %mean = f32[8,64]{1,0} fusion(%m, %sum), kind=kLoop, calls=%keep
  %new = f32[8,64]{1,0} fusion(%w, %mean), kind=kLoop, calls=%keep
  %back = bf16[8,64]{0,1} reverse(%turned), dimensions={0}
  %behind = bf16[8,512]{0,1} all-gather(%back), dimensions={1}, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %all = (f32[8,64]{1,0}, f32[8,64]{1,0}, bf16[8,512]{0,1}) tuple(%new, %mean, %behind)
}
"""
)


def found(text, *names):
    module = parsed("HloModule step\n" + text)
    return waits(module, module.entry, names)


def sent(text, target):
    ops = device_ops(parsed("HloModule step\n" + text), MESH, {}, target=target)
    return [(op.name, op.sent) for op in ops if op.is_collective]


def test_picking_the_labels_logits_waits_for_their_gradients_kernel():
    text = LOSS.replace("%LABELS", "%l")
    assert found(text, "total", "picked") == {"total": frozenset(), "picked": {"total"}}
    assert sent(text, "gpu") == [("all-reduce", 32), ("all-reduce", 32)]
    assert sent(text, "tpu") == [("all-reduce", 64)]


def test_what_comes_later_in_the_program_is_looked_at_first():
    # The labels are no array of both, so the logits decide, which the exponentials read first.
    text = LOSS.replace("%LABELS", "%k").replace("%m = ", "%k = s32[8]{0} parameter(3)\n  %m = ")
    assert found(text, "total", "picked") == {"total": frozenset(), "picked": frozenset()}
    assert sent(text, "gpu") == [("all-reduce", 64)]


def test_a_copy_of_a_weight_is_made_with_its_update():
    assert found(UPDATE, "ahead", "sum", "behind") == {
        "ahead": frozenset(),
        "sum": {"ahead"},
        "behind": {"ahead", "sum"},
    }
    assert sent(UPDATE, "gpu")[0] == ("all-gather", 8192)
    assert len(sent(UPDATE, "gpu")) == 3


def test_a_copy_that_a_collective_keeps_is_a_kernel_of_its_own():
    kept = UPDATE.replace("%c = f32[8,64]{0,1} copy(%p)", "%c = f32[8,64]{1,0} negate(%p)")
    assert found(kept, "ahead", "sum", "behind")["behind"] == frozenset()
    assert sorted(sent(kept, "gpu")) == [("all-gather", 16384), ("all-reduce", 2048)]


def test_one_that_waits_for_a_later_one_comes_behind_it():
    lines = UPDATE.split("\n")
    moved = [line for line in lines if "%back =" in line or "%behind =" in line]
    rest = [line for line in lines if line not in moved]
    place = next(number for number, line in enumerate(rest) if "%loss =" in line)
    text = "\n".join([*rest[:place], *moved, *rest[place:]])
    assert list(found(text, "ahead", "behind", "sum")) == ["ahead", "sum", "behind"]


CONVOLUTION = """
%half (p: f32[4,4,S,S]) -> bf16[4,4,S,S] {
  %p = f32[4,4,S,S]{3,2,1,0} parameter(0)
  ROOT %r = bf16[4,4,S,S]{3,2,1,0} convert(%p)
}

%step (p: f32[4,4,S,S], q: f32[4,4,S,S]) -> f32[4,4,S,S] {
  %p = f32[4,4,S,S]{3,2,1,0} parameter(0)
  %q = f32[4,4,S,S]{3,2,1,0} parameter(1)
  %h = f32[4,4,S,S]{3,2,1,0} multiply(%q, %q)
  ROOT %r = f32[4,4,S,S]{3,2,1,0} subtract(%p, %h)
}

ENTRY %main (w: f32[4,4,S,S], m: f32[4,4,S,S], x: bf16[64,8,8,4]) -> (f32[4,4,S,S], bf16[]) {
  %w = f32[4,4,S,S]{3,2,1,0} parameter(0)
  %m = f32[4,4,S,S]{3,2,1,0} parameter(1)
  %x = bf16[64,8,8,4]{3,2,1,0} parameter(2)
  %kept = bf16[4,4,S,S]{3,2,1,0} fusion(%w), kind=kLoop, calls=%half
  %there = bf16[64,8,8,4]{3,2,1,0} convolution(%x, %kept), dim_labels=b01f_oi01->b01f
  %slope = f32[4,4,S,S]{3,2,1,0} convolution(%x, %there), dim_labels=f01b_i01o->01bf
  %sum = f32[4,4,S,S]{3,2,1,0} all-reduce(%slope), to_apply=%add
  %mean = f32[4,4,S,S]{3,2,1,0} fusion(%m, %sum), kind=kLoop, calls=%step
  %new = f32[4,4,S,S]{3,2,1,0} fusion(%w, %mean), kind=kLoop, calls=%step
  %turned = bf16[4,4,S,S]{3,2,1,0} BACK
  %back = bf16[64,8,8,4]{3,2,1,0} convolution(%there, %turned), dim_labels=b01f_io01->b01f
  %last = bf16[64,8,8,4]{3,2,1,0} all-reduce(%back), to_apply=%add
  ROOT %all = (f32[4,4,S,S], f32[4,4,S,S], bf16[64,8,8,4]) tuple(%new, %mean, %last)
}
"""


@pytest.mark.parametrize(
    ("back", "waiting"),
    [
        ("reverse(%kept), dimensions={2,3}", ()),
        ("bitcast(%kept)", ("sum",)),
    ],
)
def test_a_reversed_filter_is_the_forwards_and_another_a_copy_of_its_own(back, waiting):
    text = SUM + CONVOLUTION.replace("BACK", back).replace("S,S", "1,1")
    assert found(text, "sum", "last") == {"sum": frozenset(), "last": frozenset(waiting)}
