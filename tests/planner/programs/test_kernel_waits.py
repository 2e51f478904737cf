"""What collectives wait for on a GPU, where a kernel has several results."""

from __future__ import annotations

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.collective_combining import waits
from isoshard.planner.programs.device_ops import device_ops

MESH = topology("h100:1x8").mesh((8,), ("data",))

SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


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
