"""What is alive in a scheduled program: by hand, and against XLA's own statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.planner.programs.compiling import peak_of
from isoshard.core.planner.programs.hlo_text import parsed
from isoshard.core.planner.programs.live_values import liveness
from tests.core.planner.programs.test_hlo_text import read

CHAIN = """
HloModule chain, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (p: f32[256], q: f32[256]) -> (f32[256], f32[]) {
  %p = f32[256]{0} parameter(0)
  %q = f32[256]{0} parameter(1)
  %a = f32[1024]{0} custom-call(%p), custom_call_target="grow"
  %b = f32[1024]{0} custom-call(%a), custom_call_target="keep"
  %c = f32[] custom-call(%b), custom_call_target="sum"
  %d = f32[256]{0} add(%p, %q)
  ROOT %r = (f32[256]{0}, f32[]) tuple(%d, %c)
}
"""


def test_a_chain_by_hand():
    found = liveness(parsed(CHAIN))
    assert found.arguments == 2048 and found.results == 4
    assert found.temporary == 2 * 4096 and found.total == 2048 + 4 + 8192
    assert found.peak.name == "b" and {one.maker.name for one in found.alive} == {"a", "b"}
    assert found.at["a"] == 2048 + 4 + 4096 and found.at["d"] == 2048 + 4


def test_what_is_in_another_memory_takes_none_of_the_devices():
    text = CHAIN.replace("%a = f32[1024]{0}", "%a = f32[1024]{0:S(1)}")
    assert liveness(parsed(text)).temporary == 4096


FUSED = """
HloModule fused, is_scheduled=true

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  %x = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %t = f32[64,64]{1,0} tanh(%x)
  %y = f32[64,64]{1,0} dot(%p, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[64,64]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %u = f32[64,64]{1,0} add(%z, %t)
  %v = f32[64,64]{1,0} add(%u, %x)
  ROOT %w = f32[64,64]{1,0} dot(%v, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_product_reads_any_order():
    """A transposed copy for a product is no array of its own on TPUs and GPUs."""
    text = FUSED.replace(
        "ROOT %w = f32[64,64]{1,0} dot(%v, %p)",
        "%r = f32[64,64]{1,0} transpose(%v), dimensions={1,0}\n"
        "  ROOT %w = f32[64,64]{1,0} dot(%r, %v)",
    )
    plain, targets = (liveness(parsed(text), targets=one) for one in (False, True))
    assert plain.at["r"] - targets.at["r"] == 64 * 64 * 4


def test_a_loop_keeps_its_carry_once():
    def run(x, w):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]

    shapes = (
        jax.ShapeDtypeStruct((256, 256), "float32"),
        jax.ShapeDtypeStruct((7, 256, 256), "float32"),
    )
    made = jax.jit(run).lower(*shapes).compile()
    found = liveness(parsed(made.as_text()))
    assert found.total == pytest.approx(peak_of_stats(made), rel=0.05)


@pytest.mark.parametrize("layers", [1, 4])
def test_a_step_on_eight_devices_needs_what_xla_says(layers):
    mesh = make_mesh((2, 4), ("x", "y"), axis_types=AxisType.Auto)
    weights = NamedSharding(mesh, PartitionSpec(None, "x", "y"))

    def step(w, x):
        def loss(w):
            return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

        return w - jax.grad(loss)(w)

    made = (
        jax.jit(step, donate_argnums=0, out_shardings=weights)
        .lower(
            jax.ShapeDtypeStruct((layers, 512, 512), "float32", sharding=weights),
            jax.ShapeDtypeStruct(
                (512, 512), "float32", sharding=NamedSharding(mesh, PartitionSpec("x"))
            ),
        )
        .compile()
    )
    found = liveness(parsed(made.as_text()))
    assert found.total == pytest.approx(peak_of_stats(made), rel=0.05)
    assert max(found.at.values()) == found.total


def test_a_gpu_program_needs_what_its_compiler_says():
    """The statistics are those that were recorded with the text."""
    assert liveness(read("h100")).total == pytest.approx(143_659_876, rel=0.05)


def peak_of_stats(made):
    stats = made.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    return peak_of(
        {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    )


def test_numbers_are_of_whole_bytes():
    assert all(isinstance(one, int) for one in liveness(read("host")).at.values())
    assert np.isfinite(liveness(read("v5e")).total)
