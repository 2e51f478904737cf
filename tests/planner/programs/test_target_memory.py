"""What targets' compilers keep, from the host's program: rules by hand, and recorded statistics."""

from __future__ import annotations

import pytest

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.compiling import by_partitioner
from isoshard.planner.programs.hlo_liveness import liveness
from isoshard.planner.programs.target_schedule import SAVED, in_target_order, target_liveness
from tests.planner.programs.sample_steps import layers

BIG = 1024 * 1024 * 4

NORM = """
HloModule norm, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (p: f32[1024,1024]) -> (f32[1024,1024], f32[1024]) {
  %p = f32[1024,1024]{1,0} parameter(0)
  %x = f32[1024,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %y = f32[1024,1024]{1,0} dot(%x, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[1024,1024]{1,0} dot(%y, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %zero = f32[] constant(0)
  %n = f32[1024]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  ROOT %r = (f32[1024,1024]{1,0}, f32[1024]{0}) tuple(%z, %n)
}
"""


def test_what_is_small_and_reads_last_runs_at_once():
    ordered = in_target_order(parsed(NORM)).entry.instructions
    names = list(ordered)
    assert names.index("n") < names.index("y")
    large = NORM.replace("f32[1024]{0} reduce", "f32[1024,1024]{1,0} negate")
    kept = list(in_target_order(parsed(large)).entry.instructions)
    assert kept.index("n") > kept.index("z")


def test_a_gpu_over_its_limit_saves_memory_and_says_so():
    module = parsed(NORM)
    roomy, said = target_liveness(module, "gpu", 80 * 10**9)
    assert said == () and roomy.temporary == liveness(in_target_order(module)).temporary
    tight, said = target_liveness(module, "gpu", 3 * BIG)
    assert said == (SAVED,) and tight.temporary <= roomy.temporary


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_memory_of_an_argument_that_is_written_over_counts_once(platform):
    text = NORM.replace("dot(%x, %p)", "dot(%x, %c)").replace(
        "  %x =", "  %c = f32[1024,1024]{1,0} copy(%p)\n  %x ="
    )
    found = [target_liveness(parsed(one), platform, 80 * 10**9)[0].total for one in (NORM, text)]
    assert found[0] == found[1]


def test_a_step_for_h100_needs_what_its_compiler_said(tmp_path):
    """jax-cuda12-plugin 0.10.2 said 14,126,419,556 bytes; compiling it again needs that package."""
    mesh = topology("h100:1x4").mesh((2, 2), ("data", "model"))
    step = layers(mesh, count=8, width=4096, inner=16384, batch=65536)
    found = by_partitioner(step, cache=tmp_path)
    assert found.memory.peak == pytest.approx(14_126_419_556, rel=0.05)
