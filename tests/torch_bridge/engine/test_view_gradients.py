"""Autograd through views and in-place writes equals the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoshard.torch_bridge as xs

Op = Callable[[torch.Tensor], Any]


GRADIENTS: dict[str, Op] = {
    "write_through_view": lambda x: _set(x * 1.0, lambda y: y.view(12)[2:7].mul_(3)),
    "write_through_t": lambda x: _set(x * 1.0, lambda y: y.t()[1].mul_(y.t()[2].clone())),
    "slice_assignment": lambda x: _set(x * 2.0, lambda y: y.__setitem__(1, y[0].clone() * 3)),
    "zero_a_row": lambda x: _set(x.sin(), lambda y: y[1].zero_()),
    "masked_fill": lambda x: _set(x * 1.0, lambda y: y.masked_fill_(y > 1, 0.0)),
    "copy_into": lambda x: _set(torch.zeros_like(x), lambda y: y[:, 1:].copy_(x[:, :3] ** 2)),
    "index_put": lambda x: _set(
        x * 1.0, lambda y: y.index_put_((torch.tensor([0, 2]).to(y.device),), x[1:] * 5)
    ),
    "unbind": lambda x: sum(row * (i + 1) for i, row in enumerate(x.unbind(1))),
    "chunk": lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1] ** 2,
    "diagonal": lambda x: x.diagonal() ** 2,
    "unfold": lambda x: x.unfold(1, 3, 1) ** 2,
    "expand": lambda x: x[:, :1].expand(3, 5) * torch.arange(5.0).to(x.device),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1) ** 2,
    "view_after_write": lambda x: _set(x * 2, lambda y: y.relu_()).view(2, 6)[:, ::2] * 2,
    "fresh_views_of_a_written_base": lambda x: _views_then_write(x),
}


def _set(y: torch.Tensor, write: Op) -> torch.Tensor:
    write(y)
    return y


def _views_then_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y[1:]
    y.mul_(y.detach().clone())
    return view * 3


def test_gradients_through_views_and_writes_equal_the_cpu():
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "jax"):
        for call in GRADIENTS.values():
            x = data.clone().to(device).requires_grad_()
            y = call(x)
            (y * y.detach().cos()).sum().backward()
            results.append((y.detach(), x.grad))
    xs.sync()
    count = len(GRADIENTS)
    for name, wants, gots in zip(GRADIENTS, results[:count], results[count:], strict=True):
        for want, got in zip(wants, gots, strict=True):
            torch.testing.assert_close(got.cpu(), want, msg=lambda t, name=name: f"{name}: {t}")


def test_writing_to_a_leaf_that_requires_grad_is_refused():
    x = torch.ones(3, device="jax", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        x[0] = 2
    with torch.no_grad():
        x[0] = 2
    x.detach().mul_(4)
    assert x.tolist() == [8, 4, 4] and not x.detach().requires_grad


def test_backward_notices_a_saved_tensor_that_was_overwritten():
    x = torch.ones(3, device="jax", requires_grad=True)
    y = x.exp()
    y.view(-1).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        y.sum().backward()


def _turned_then(write: Op) -> Op:
    """Turn a view in place, write, and use it with weights."""

    def run(x: torch.Tensor) -> torch.Tensor:
        base = x.view(3, 2, 2) * 1.0
        view = base[1]
        held = view.exp()
        assert view.t_() is view
        write(base, view)
        return view * torch.arange(4.0).view(2, 2).to(x.device) + held

    return run


def _pair(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([2.0, 3.0]).to(like.device)


TURNED: dict[str, Op] = {
    "alone": _turned_then(lambda base, view: None),
    "write": _turned_then(lambda base, view: view.mul_(_pair(view))),
    "write_through_a_view": _turned_then(lambda base, view: view[0].mul_(_pair(view))),
    "write_to_the_base": _turned_then(lambda base, view: base.mul_(2)),
    "twice": _turned_then(
        lambda base, view: view.unsqueeze_(0).mul_(3).squeeze_(0).transpose_(0, 1)
    ),
}


def test_a_view_that_is_turned_in_place():
    values, grads = torch.arange(12.0).reshape(3, 4) / 10, []
    for call in TURNED.values():
        want, got = values.clone().requires_grad_(), values.to("jax").requires_grad_()
        for x in (want, got):
            call(x).sum().backward()
        grads.append((got.grad, want.grad))
    xs.sync()
    for name, (got, want) in zip(TURNED, grads, strict=True):
        torch.testing.assert_close(got.cpu(), want, msg=lambda t, name=name: f"{name}: {t}")


def test_a_row_of_what_was_unsqueezed_in_place_can_be_written():
    grads = []
    for device in ("cpu", "jax"):
        a = torch.tensor(2.0).to(device).requires_grad_()
        made = torch.nn.InstanceNorm1d(2)(torch.ones(2, 2, 6).to(device))
        made.unsqueeze_(0)
        made[0] = a
        made.sum().backward()
        grads.append(a.grad.cpu())
    assert torch.equal(*grads)
