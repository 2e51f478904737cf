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
from isoshard import P
from tests.torch_bridge.on_both import same
from tests.torch_bridge.training.test_training import draw

functional = torch.nn.functional
Case = Callable[[torch.Tensor], Any]
# One small program on many layouts, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


# --- Views share memory --------------------------------------------------------------------------

WRITES: dict[str, Case] = {
    "view": lambda x: x.view(4, 16).mul_(3),
    "reshape": lambda x: x.reshape(16, 4)[::2].add_(1),
    "slice of t": lambda x: x.t()[1:3].zero_(),
    "split": lambda x: x.split([1, 7], 1)[1].mul_(2),
    "diagonal": lambda x: x.diagonal().zero_(),
    "as_strided": lambda x: x.as_strided((2, 2), (8, 1), 1).mul_(7),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].zero_(),
    "iteration": lambda x: [row.add_(number) for number, row in enumerate(x)],
    "view of view": lambda x: x.t()[2:6].reshape(4, 2, 4).unbind(0)[1].t().exp_(),
    "mask": lambda x: x.__setitem__(x > 0, 0.0),
    "out": lambda x: torch.add(x[0], 1, out=x[1]),
    "copy_ of another part": lambda x: x[4:].copy_(x[:4]),
    "index_put_": lambda x: x.view(-1).index_put_(
        (torch.tensor([1, 1, 9]).to(x.device),), x[0, :3] * 2, accumulate=True
    ),
    "scatter_": lambda x: x.t().scatter_(0, torch.tensor([[1], [2]]).to(x.device), 5.0),
    "masked_fill_": lambda x: x[2:4].masked_fill_(x[2:4] < 0, 3.0),
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
