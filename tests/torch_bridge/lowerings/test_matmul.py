"""Matrix products against CPU torch; grouped ones with their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import evaluate, together

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


def operands(name: str, dtype=torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in SHAPES[name]]


def test_products():
    """Of floats, halves, integers, complex numbers and nothing; by factors."""
    complexes = [torch.randn(4, dtype=torch.complex64) for _ in range(2)]
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    a, three, b = torch.randn(6, 3), torch.randn(5, 3, 4), torch.randn(6, 4)
    with together() as check:
        for name in SHAPES:
            op, given = getattr(aten, name).default, operands(name)
            check(op, *given)
            if name in ("mm", "bmm", "addmm", "mv"):
                check(op, *operands(name, torch.bfloat16), rtol=2e-2, atol=5e-2)
                check(op, *((3 * x).long() for x in given))
            if name.startswith("add") or name == "baddbmm":
                for beta, alpha in ((0.5, 2.0), (0, 1), (1, 3)):
                    check(op, *given, beta=beta, alpha=alpha)
                addend, *factors = given
                check(op, addend * torch.nan, *factors, beta=0)  # it is not read
        for left, right in (((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 0))):
            check(aten.mm.default, torch.ones(left), torch.ones(right))
        check(aten.vdot.default, *complexes)
        check(aten.mm.default, complexes[0][None], complexes[1][:, None])
        check(aten.linear.default, x, weight, bias)
        check(aten.linear.default, x[0, 0], weight)
        check(aten._trilinear.default, a, three, b, [1, 3], [0], [1, 2], [2, 3])  # as bilinear
        bytes_ = torch.full((32, 32), 100, dtype=torch.int8)
        check(aten._int_mm.default, bytes_, bytes_)
    x, y = operands("mm", torch.bfloat16)
    (got,) = evaluate(aten.mm.dtype, x, y, torch.float32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x.float() @ y.float(), rtol=1e-5)


def test_addmm_is_the_program_written_by_hand():
    """No multiplication by the default factors, no conversion."""
    arrays = jnp.ones(5), jnp.ones((3, 4)), jnp.ones((4, 5))
    ours = jax.make_jaxpr(registry.find(aten.addmm.default).function)(*arrays)
    plain = jax.make_jaxpr(lambda bias, x, w: x @ w + bias)(*arrays)
    assert str(ours) == str(plain)


grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@pytest.mark.parametrize(
    "shapes",
    [
        ((12, 8), (3, 8, 16)),
        ((3, 8, 16), (16, 12)),
        ((8, 12), (12, 16)),
        ((3, 8, 16), (3, 16, 4)),
    ],
    ids=["rows", "columns", "inner", "batched"],
)
def test_grouped_products(shapes):
    """Of three groups of 12, of which the second is empty."""
    found = []
    for device in ("jax", "cpu"):
        source = torch.Generator().manual_seed(0)
        one, two = (torch.randn(shape, generator=source).to(device) for shape in shapes)
        one.requires_grad_(), two.requires_grad_()
        batched = len(shapes[0]) == len(shapes[1]) == 3
        ends = None if batched else torch.tensor((4, 4, 12), dtype=torch.int32, device=device)
        result = grouped_mm(one, two, offs=ends)
        weights = torch.randn(result.shape, generator=source).to(device)
        torch.autograd.backward(result, weights)
        found.append([tensor.detach().cpu() for tensor in (result, one.grad, two.grad)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_grouped_rows_behind_the_last_end_are_zero_and_a_bias_is_refused():
    rows, experts = torch.ones(12, 8, device="jax"), torch.ones(3, 8, 16, device="jax")
    ends = torch.tensor([2, 4, 8], dtype=torch.int32, device="jax")
    result = grouped_mm(rows, experts, offs=ends).cpu()
    assert (result[:8] == 8).all() and (result[8:] == 0).all()
    bias = torch.ones(3, 16, device="jax")
    result = torch.ops.aten._grouped_mm.default(rows, experts, ends, bias)
    with pytest.raises(NotImplementedError, match="bias has no lowering; add the bias of each row"):
        result.cpu()
