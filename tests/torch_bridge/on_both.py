"""Run one program on the CPU and on the `jax` device, and compare everything that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from tests.torch_bridge.training.test_training import draw

Program = Callable[..., Any]


def leaves(inputs: tuple[torch.Tensor, ...], device: str, grad: bool) -> list[torch.Tensor]:
    """Copies of `inputs` on a device; the floating ones require gradients if `grad`."""
    found = [data.detach().clone().to(device) for data in inputs or (draw(3, 4),)]
    for leaf in found:
        leaf.requires_grad_(grad and leaf.is_floating_point())
    return found


def on_both(
    program: Program,
    *inputs: torch.Tensor,
    grad: bool = True,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """A program of leaf tensors returns the same tree on both devices.

    Args:
        program: takes tensors on one device; what it returns is compared.
        *inputs: CPU tensors; without any, one of shape (3, 4).
        grad: whether the leaves require gradients.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    want = program(*leaves(inputs, "cpu", grad))
    got = program(*leaves(inputs, "jax", grad))
    same(got, want, rtol=rtol, atol=atol)


def same(got: Any, want: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Two trees are alike: structure, tensors (values, shapes, dtypes), and everything else."""
    gots, structure = pytree.tree_flatten(got)
    wants, wanted = pytree.tree_flatten(want)
    assert structure == wanted
    for number, (g, w) in enumerate(zip(gots, wants, strict=True)):
        if not isinstance(w, torch.Tensor):
            assert g == w, f"leaf {number}"
            continue
        assert isinstance(g, xs.XLAShardedTensor), f"leaf {number} is a {type(g).__name__}"
        assert (g.dtype, g.shape, g.requires_grad) == (w.dtype, w.shape, w.requires_grad), number
        torch.testing.assert_close(
            g.detach().cpu(), w.detach(), rtol=rtol, atol=atol, equal_nan=True
        )


def raises_on_both(program: Program, *inputs: torch.Tensor, match: str, grad: bool = True) -> None:
    """A program raises torch's own error on both devices, and work goes on afterwards."""
    for device in ("cpu", "jax"):
        with pytest.raises(Exception, match=match) as caught:
            program(*leaves(inputs, device, grad))
        assert isinstance(caught.value, RuntimeError | TypeError | ValueError | IndexError)
    x = torch.arange(3.0, device="jax", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.tolist() == [0, 2, 4]
