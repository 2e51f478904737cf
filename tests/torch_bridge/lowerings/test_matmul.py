"""Matrix products against CPU torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate

aten = torch.ops.aten
SHAPES = {
    "mm": [(3, 4), (4, 5)],
    "bmm": [(2, 3, 4), (2, 4, 5)],
    "mv": [(3, 4), (4,)],
    "dot": [(4,), (4,)],
    "vdot": [(4,), (4,)],
    "addmm": [(5,), (3, 4), (4, 5)],
    "baddbmm": [(2, 3, 5), (2, 3, 4), (2, 4, 5)],
    "addmv": [(3,), (3, 4), (4,)],
    "addr": [(3, 4), (3,), (4,)],
    "addbmm": [(3, 5), (2, 3, 4), (2, 4, 5)],
}
SCALED = ("addmm", "baddbmm", "addmv", "addr", "addbmm")


def operands(name: str, dtype=torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in SHAPES[name]]


@pytest.mark.parametrize("name", SHAPES)
def test_product(name):
    check(getattr(aten, name).default, *operands(name))


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "mv"])
def test_bfloat16(name):
    check(getattr(aten, name).default, *operands(name, torch.bfloat16), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "addmm"])
def test_integers(name):
    integers = [(3 * x).long() for x in operands(name)]
    check(getattr(aten, name).default, *integers)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 2.0), (0, 1), (1, 3)])
def test_factors(name, beta, alpha):
    check(getattr(aten, name).default, *operands(name), beta=beta, alpha=alpha)


@pytest.mark.parametrize("name", SCALED)
def test_beta_zero_does_not_read_the_addend(name):
    addend, *factors = operands(name)
    check(getattr(aten, name).default, addend * torch.nan, *factors, beta=0)


@pytest.mark.parametrize("shapes", [[(0, 4), (4, 5)], [(3, 0), (0, 5)], [(3, 4), (4, 0)]])
def test_empty(shapes):
    check(aten.mm.default, *(torch.ones(shape) for shape in shapes))


def test_complex_vdot_conjugates():
    x, y = torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    check(aten.vdot.default, x, y)
    check(aten.mm.default, x[None], y[:, None])


def test_wider_result():
    x, y = operands("mm", torch.bfloat16)
    (got,) = evaluate(aten.mm.dtype, x, y, torch.float32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x.float() @ y.float(), rtol=1e-5)


def test_integer_product_of_bytes_is_exact():
    x = torch.full((32, 32), 100, dtype=torch.int8)
    check(aten._int_mm.default, x, x)


def test_linear():
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    check(aten.linear.default, x, weight, bias)
    check(aten.linear.default, x[0, 0], weight)


def test_trilinear_as_bilinear_calls_it():
    a, weight, b = torch.randn(6, 3), torch.randn(5, 3, 4), torch.randn(6, 4)
    check(aten._trilinear.default, a, weight, b, [1, 3], [0], [1, 2], [2, 3])


def test_addmm_is_the_program_written_by_hand():
    """No multiplication by the default factors, no conversion."""
    arrays = jnp.ones(5), jnp.ones((3, 4)), jnp.ones((4, 5))
    ours = jax.make_jaxpr(registry.find(aten.addmm.default).function)(*arrays)
    plain = jax.make_jaxpr(lambda bias, x, w: x @ w + bias)(*arrays)
    assert str(ours) == str(plain)
