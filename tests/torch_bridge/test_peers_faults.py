"""Behaviour that bridges between torch and XLA are known to get wrong without a word.

Each case says in one line what must hold, on one device and, where layouts matter, on a mesh. What
it is compared with is always plain CPU torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import on_both, raises_on_both, same
from tests.torch_bridge.training.test_training import draw

functional = torch.nn.functional
Case = Callable[[torch.Tensor], Any]
# One small program on many layouts, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


# --- Views share memory --------------------------------------------------------------------------

WRITES: dict[str, Case] = {
    "view": lambda x: x.view(4, 16).mul_(3),
    "reshape": lambda x: x.reshape(16, 4)[::2].add_(1),
    "flatten": lambda x: x.flatten()[3:7].zero_(),
    "t": lambda x: x.t().add_(1),
    "slice of t": lambda x: x.t()[1:3].zero_(),
    "permute": lambda x: x.permute(1, 0)[:, 1].neg_(),
    "unsqueeze": lambda x: x.unsqueeze(1)[0].add_(1),
    "squeeze": lambda x: x[:1].squeeze(0).add_(1),
    "chunk": lambda x: x.chunk(3, 1)[1].add_(1),
    "split": lambda x: x.split([1, 7], 1)[1].mul_(2),
    "unbind": lambda x: x.unbind(1)[2].add_(1),
    "element": lambda x: x[1, 2].fill_(5),
    "steps": lambda x: x[::3, 1::2].mul_(-1),
    "diagonal": lambda x: x.diagonal().zero_(),
    "detach": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "as_strided": lambda x: x.as_strided((2, 2), (8, 1), 1).mul_(7),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].zero_(),
    "iteration": lambda x: [row.add_(number) for number, row in enumerate(x)],
    "view of view": lambda x: x.t()[2:6].reshape(4, 2, 4).unbind(0)[1].t().exp_(),
    "mask": lambda x: x.__setitem__(x > 0, 0.0),
    "out": lambda x: torch.add(x[0], 1, out=x[1]),
    "copy_ of another part": lambda x: x[4:].copy_(x[:4]),
    "copy_ with broadcasting": lambda x: x.copy_(x[0] * 2),
    "index_put_": lambda x: x.view(-1).index_put_(
        (torch.tensor([1, 1, 9]).to(x.device),), x[0, :3] * 2, accumulate=True
    ),
    "scatter_": lambda x: x.t().scatter_(0, torch.tensor([[1], [2]]).to(x.device), 5.0),
    "masked_fill_": lambda x: x[2:4].masked_fill_(x[2:4] < 0, 3.0),
    "lerp_": lambda x: x[0].lerp_(x[1], 0.25),
    "addcdiv_": lambda x: x[:, 0].addcdiv_(x[:, 1], x[:, 2].square() + 1, value=-2),
}


def test_a_write_through_a_view_reaches_the_base_and_every_other_view(mesh):
    """Every write on its own tensor; all of them are one program."""
    found, layouts, specs = {}, {}, (P("x", "y"), P(None, ("x", "y")))
    for number, (name, write) in enumerate(WRITES.items()):
        want, spec = torch.arange(64.0).reshape(8, 8) / 8 - 4, specs[number % 2]
        got = iso.shard(want.clone(), mesh, spec)
        found[name] = [[x, x.view(-1), x[3:], x.t()] for x in (got, want)]
        layouts[name] = got, spec
        write(want), write(got)
    for again in range(2):
        for name, (got, want) in found.items():
            try:
                same(got, want)
            except AssertionError as error:
                raise AssertionError(f"{name}, {again}") from error
            want[0].sub_(1), got[0].sub_(1)
    for name, (got, spec) in layouts.items():
        assert got.partition_spec == spec, f"{name} keeps the layout of the memory"


def test_gradients_flow_through_views_that_were_written():
    """A view carries its gradient, and a write through one is part of the graph."""

    def program(x: torch.Tensor) -> Any:
        y = x * 2
        y[0].mul_(x[1])
        y.t()[1:].add_(1)
        first = x[0] * 3
        (y.square().sum() + first.sum()).backward()
        return y, x.grad, first.requires_grad

    on_both(program)


def test_results_of_ops_on_a_sharded_tensor_are_tensors_like_any_other(mesh):
    """`t`, `T`, indexing, slicing, split, chunk, permute, select, unbind, narrow, and leaving."""
    data = draw(8, 8)
    x = iso.shard(data, mesh, P("x", "y"))

    def views(a: torch.Tensor) -> Any:
        parts = [a.split(4), a.chunk(2, 1), a.unbind(), a.select(1, 3), a.narrow(0, 2, 3)]
        return [a.t(), a.T, a[0], a[1:3, ::2], a.mT @ a, a.expand(2, 8, 8), a.view(-1), parts]

    same(views(x), views(data))
    assert type(x.cpu()) is torch.Tensor and torch.equal(x.cpu(), data)
    np.testing.assert_array_equal(x.numpy(), data.numpy())
    np.testing.assert_array_equal(np.asarray(x), data.numpy())
    assert x.tolist() == data.tolist()
    assert copy.deepcopy(x).partition_spec == P("x", "y")
    assert x.global_tensor is x


def test_placements_are_right_for_names_and_tuples(mesh):
    """A spec by names or by tuples of axes gives the placements of the same spec by numbers."""
    from torch.distributed.tensor import Replicate, Shard

    x = torch.zeros(8, 8)
    assert iso.shard(x, mesh, P("x", "y")).placements == (Shard(0), Shard(1))
    assert iso.shard(x, mesh, (0, 1)).placements == (Shard(0), Shard(1))
    assert iso.shard(x, mesh, P(("x", "y"), None)).placements == (Shard(0), Shard(0))
    assert iso.shard(x, mesh, P(None, "x")).placements == (Shard(1), Replicate())


def test_results_know_their_layout_after_execution(mesh):
    """What XLA decided for a result can be asked for, and annotating it does not change others."""
    x = iso.shard(draw(8, 8), mesh, P("x", None))
    y = x * 2
    xs.sync()
    assert y.mesh is not None and y.partition_spec is not None
    z = iso.reshard(x, P(None, "y"))
    assert x.partition_spec == P("x") and z.partition_spec == P(None, "y")


# --- Promotion -----------------------------------------------------------------------------------

PROMOTION: dict[str, Case] = {
    "bfloat16 tensor and float32 number": lambda x: x.bfloat16() * torch.tensor(2.0).to(x.device),
    "float32 tensor and bfloat16 tensor": lambda x: x * x.bfloat16(),
    "float16 and bfloat16": lambda x: x.half() + x.bfloat16(),
    "integers and a float": lambda x: x.int() * 1.5,
    "uint8 sum": lambda x: x.abs().to(torch.uint8).sum(),
    "bool sum": lambda x: (x > 0).sum(),
    "bool product": lambda x: (x > 0).prod(),
    "division of integers": lambda x: x.int() / 3,
    "floor division": lambda x: x.int() // 3,
    "power": lambda x: x.int() ** 2,
    "cat": lambda x: torch.cat([x.half(), x]),
    "stack of 0-d": lambda x: torch.stack([x.sum(), x.int().sum().float()]),
    "int64 argmax": lambda x: x.argmax(1),
    "in-place keeps its dtype": lambda x: x.half().mul_(x.abs().float()[0, 0]),
    "uint8 wraps": lambda x: x.abs().to(torch.uint8) - 200,
    "type_as leaves its tensor alone": lambda x: [x.type_as(x.int()), x],
    "mean of half": lambda x: x.half().mean(),
}


def test_promotion_is_that_of_torch():
    data = (draw(3, 4) * 3).round()
    x = data.to("jax")
    found = {name: program(x) for name, program in PROMOTION.items()}  # one program
    for name, got in found.items():
        leaves = map(torch.utils._pytree.tree_leaves, (got, PROMOTION[name](data)))
        for one, want in zip(*leaves, strict=True):
            assert one.dtype == want.dtype, name
            torch.testing.assert_close(one.cpu(), want, rtol=1e-2, atol=1e-2, msg=name)


def test_what_torch_refuses_to_promote_is_refused():
    raises_on_both(lambda x: x.int().mean(), match=r"(?i)mean.*(floating|dtype)", grad=False)
    raises_on_both(lambda x: x.int().add_(0.5), match=r"can't be cast|Promotion of int", grad=False)
    raises_on_both(lambda x: x.int().div_(2), match=r"can't be cast", grad=False)
    raises_on_both(lambda x: x @ x.t().half(), match=r"dtype", grad=False)
