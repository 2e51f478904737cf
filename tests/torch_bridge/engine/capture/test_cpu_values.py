"""What a compiled step computes from CPU tensors and buffers that it finds: never an old value."""

from __future__ import annotations

import types

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.on_both import around


def _pair() -> torch.Tensor:
    return torch.tensor([2.0, 3.0])


def _seven(thing) -> None:
    thing.kept.fill_(7)


def _other_memory(thing) -> None:
    thing.kept.data = torch.tensor([4.0, 5.0])


READS = {
    "an element": lambda kept: kept[0].item(),
    "a view": lambda kept: kept.view(2)[1].item(),
    "a part of several": lambda kept: kept.unbind()[1].item(),
    "a result of several": lambda kept: kept.max(0)[0].item(),
    "a result of several by name": lambda kept: kept.sort(descending=True).values[1].item(),
    "a sum": lambda kept: kept.sum().item(),
    "an integer": lambda kept: kept[1].long().item(),
    "a list": lambda kept: kept.tolist()[0],
    "a condition": lambda kept: 2.0 if kept[0] < 5 else 3.0,
    "a comparison": lambda kept: 2.0 if torch.equal(kept, torch.tensor([2.0, 3.0])) else 3.0,
    "numpy": lambda kept: float(kept.numpy()[0]),
    "a write to a view": lambda kept: kept[:1].add_(1).sum().item(),
    "writes to parts": lambda kept: [part.mul_(2) for part in kept.split(1)][1].item(),
    "a copy that is written": lambda kept: kept.clone().add_(1)[0].item(),
    "a result that is written": lambda kept: (kept * 2).add_(1).mul_(3)[1].item(),
    "what was made and filled": lambda kept: torch.zeros(2).add_(kept)[1].item(),
}


@pytest.mark.parametrize("name", READS)
def test_a_tensor_on_the_cpu(name):
    read, change = READS[name], (_seven, _other_memory)[len(name) % 2]

    def make(device):
        return types.SimpleNamespace(kept=_pair())

    def step(thing, x):
        return x * read(thing.kept)

    (wanted, theirs), (results, ours) = around(make, step, change, torch.ones(3))
    assert results == wanted
    assert ours.kept.tolist() == theirs.kept.tolist()


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (lambda: memoryview(bytearray(b"ab")), lambda kept: kept[0], lambda kept: _put(kept, 5)),
        (lambda: bytearray(b"ab"), lambda kept: kept[0], lambda kept: _put(kept, 5)),
        (
            lambda: torch.Generator().manual_seed(3),
            lambda kept: kept.initial_seed(),
            lambda kept: kept.manual_seed(5),
        ),
    ],
    ids=["memoryview", "bytearray", "generator"],
)
def test_a_buffer_or_a_seed(make, read, change):
    kept = make()
    run = xs.compile(lambda x: x * read(kept))
    x = torch.ones(3, device="jax")
    assert [run(x).tolist() for _ in range(2)] == [[float(read(kept))] * 3] * 2
    change(kept)
    assert run(x).tolist() == [5.0] * 3


def _put(kept, number: int) -> None:
    kept[0] = number


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        (lambda: torch.eye(3).to_sparse(), lambda kept: float(kept.shape[0])),
        (lambda: torch.eye(3).to_sparse(), lambda kept: kept.to_dense().sum().item()),
        (lambda: torch.eye(3).to_sparse_csr(), lambda kept: float(kept.shape[0])),
        (lambda: torch.eye(3), lambda kept: kept.to_sparse().to_dense().sum().item()),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3), torch.ones(1)]),
            lambda kept: float(kept.size(0)),
        ),
        (lambda: torch.ones(3, device="meta"), lambda kept: float(kept.shape[0])),
        (torch.nn.parameter.UninitializedParameter, lambda kept: 3.0 if kept is not None else 1.0),
    ],
    ids=["sparse", "dense of sparse", "csr", "sparse of dense", "nested", "meta", "uninitialized"],
)
@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:Sparse CSR")
def test_a_tensor_of_another_layout_is_no_trouble(kept, read):
    found = kept()
    run = xs.compile(lambda x: x * read(found))
    assert [run(torch.ones(2, device="jax")).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3


def test_the_values_of_a_sparse_tensor_are_not_written_back():
    sparse = torch.eye(3).to_sparse().coalesce()
    run = xs.compile(lambda x: x * sparse.values()[0].item())
    x = torch.ones(2, device="jax")
    assert [run(x).tolist() for _ in range(2)] == [[1.0, 1.0]] * 2
    sparse.values().fill_(7)
    assert run(x).tolist() == [7.0, 7.0]
    assert sparse.values().tolist() == [7.0] * 3
