"""Which values get memory, and how much is alive."""

import jax
import jax.numpy as jnp
from jax import lax

from isoshard.core.planner.axes.combining import combined
from isoshard.core.planner.axes.flat_program import flattened
from isoshard.core.planner.axes.fused_kernels import FusedKernel
from isoshard.core.planner.axes.fusion import Fusion
from isoshard.core.planner.axes.liveness import liveness
from isoshard.core.planner.axes.local_program import LocalOp
from isoshard.core.planner.axes.localizing import localized
from isoshard.core.planner.axes.spreading import ArrayLayouts, spread
from isoshard.core.planner.axes.target_rules import RULES

N = 4 * 64 * 64


def fused(function, *shapes):
    """The fusion of a function on one device."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    flat = flattened(jax.make_jaxpr(function)(*structs))
    layouts = ArrayLayouts({"x": 1})
    laid = spread(flat, layouts, {})
    wanted = [None] * len(flat.results)
    return Fusion(localized(flat, layouts, laid, wanted, RULES["cpu"]), RULES["cpu"])


def peak(function, *shapes):
    fusion = fused(function, *shapes)
    return liveness(fusion).peak


def names(fusion):
    return [one.op.name for one in fusion.kernels]


def test_an_elementwise_chain_is_one_kernel():
    fusion = fused(lambda x: jnp.cos(jnp.sin(x) * 2.0 + x), (64, 64))
    assert names(fusion) == ["cos"]
    assert fusion.kernels[0].reads == fusion.program.inputs
    assert fusion.kernels[0].flops == 4 * 64 * 64


def test_what_is_costly_and_read_twice_is_kept():
    assert names(fused(lambda x: (jnp.sin(x) @ x) @ jnp.sin(x), (64, 64)))[0] == "sin"


def test_reshape_has_its_operands_memory():
    assert names(fused(lambda x: (x @ x).reshape(-1) * 2.0, (64, 64))) == ["dot_general", "mul"]


def test_a_chain_of_products_keeps_two():
    def chain(x):
        for _ in range(5):
            x = x @ x
        return x

    assert peak(chain, (64, 64)) == 2 * N


def test_residuals_are_kept_until_the_backward():
    def loss(x):
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return jnp.sum(x)

    assert peak(jax.grad(loss), (64, 64)) >= 4 * N


def test_a_loop_needs_what_its_body_needs():
    def loop(x, w):
        return lax.scan(lambda h, one: (jnp.tanh(h @ one) @ one, None), x, w)[0]

    needed = peak(loop, (64, 64), (5, 64, 64))
    assert 2 * N <= needed <= 4 * N


def test_independent_all_reduces_are_one():
    def kernel(read, write, name="all-reduce"):
        return FusedKernel(
            LocalOp(name, None, (read,), (write,), axes=(0,)), (read,), (write,), 0.0
        )

    order = [kernel(0, 1), kernel(1, 2, "mul"), kernel(3, 4), kernel(2, 5)]
    found = combined(order)
    assert [len(one.together) for one in found] == [2, 0, 0]
    assert found[0].writes == (1, 4)
    assert found[-1].writes == (5,)
