"""Operators on every kind of split, forward and backward, against the CPU in float64.

Each is applied to `x * x / x`, whose padding is NaN, as are its gradients there.
"""

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

COLUMNS = 6

FLAT = {
    "order": {
        "cumprod": lambda x, w: x.cumprod(1),
        "topk": lambda x, w: x.topk(3, 0).values,
        "slice": lambda x, w: x[3:11, 1:],
        "tril": lambda x, w: x.tril(),
        "diff": lambda x, w: x.diff(dim=0),
        "fft of the rows": lambda x, w: torch.fft.fft(x, dim=0).abs(),
    },
    "products": {
        "cdist": lambda x, w: torch.cdist(x, x + 1),
        "cross": lambda x, w: torch.linalg.cross(x[:, :3], x[:, 3:]),
        "embedding": lambda x, w: F.embedding((x[:, 0].abs() * 2).long(), w),
        "mlp": lambda x, w: F.gelu(F.relu(F.linear(x, w)) @ w),
        "causal attention": lambda x, w: F.scaled_dot_product_attention(
            *[(x @ w).view(1, -1, 2, 3).transpose(1, 2)] * 3, is_causal=True
        ),
    },
}

ROWS = 18
SPLITS = {
    "given": ((4,), ("x",), P("x"), {0: (5, 2, 7, 4)}),
    "empty": ((4,), ("x",), P("x"), {0: (0, 3, 9, 6)}),
}


def lay_out(x, split):
    shape, names, spec, sizes = SPLITS[split]
    per_axis = [sizes.get(axis) for axis in range(x.ndim)]
    mesh = iso.make_mesh(shape, names)
    return iso.shard(x, mesh, spec, uneven="pad", sizes=per_axis).requires_grad_()


def samples(*shapes):
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=random) for shape in shapes)
    return x.sign() * (0.5 + x.abs()), w


def results(operator, x, w):
    found = operator(x * x / x, w)
    return found if isinstance(found, list) else [found]


def loss_of(found):
    """A sum in which every element counts otherwise."""
    return sum(
        (
            one * torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape).to(one.device)
        ).sum()
        for one in found
        if one.dtype.is_floating_point
    )


def check(operators, split, shapes):
    x, w = samples(*shapes)
    laid = {name: (lay_out(x, split), w.to("jax")) for name in operators}
    for _, weight in laid.values():
        weight.requires_grad_()
    found = {name: results(operators[name], *laid[name]) for name in operators}
    total = sum(loss_of(one) for one in found.values())
    total.backward()
    xs.sync()
    for name, operator in operators.items():
        wide = [t.double().requires_grad_() for t in (x, w)]
        want = results(operator, *wide)
        loss = loss_of(want)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        for ours, right in zip(found[name], want, strict=True):
            close(ours, right, name)
        for ours, right in zip(laid[name], wide, strict=True):
            if right.grad is not None:
                close(ours.grad, right.grad, f"gradient of {name}")
        gradient = laid[name][0].grad
        if gradient is not None:
            assert gradient.block_sizes == laid[name][0].block_sizes, name
            have, want = gradient.named_sharding, laid[name][0].named_sharding
            assert have.is_equivalent_to(want, x.ndim), name


def close(ours, right, name):
    assert ours.shape == right.shape, name
    ours = ours.detach().cpu().to(right.dtype)
    assert torch.allclose(ours, right.detach(), rtol=1e-3, atol=1e-3), (
        f"{name}: off by {(ours - right).abs().max()}"
    )


FAMILIES = {"given": "products", "empty": "order"}
"""Reductions and shapes: tests/domain/test_lifting_table.py; images: test_block_operators."""


@pytest.mark.parametrize(("split", "family"), FAMILIES.items())
def test_operators_of_rows(split, family):
    check(FLAT[family], split, [(ROWS, COLUMNS), (COLUMNS, COLUMNS)])
