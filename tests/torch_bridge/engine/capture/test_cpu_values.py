"""What a compiled step computes from CPU tensors and buffers that it finds: never an old value."""

from __future__ import annotations

import types

import pytest
import torch

import isoshard.torch_bridge as xs


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


@pytest.mark.parametrize("change", [_seven, _other_memory])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_tensor_on_the_cpu(read, change):
    found = {}
    for device in ("cpu", "jax"):
        thing = types.SimpleNamespace(kept=_pair())
        x = torch.ones(3, device=device)

        def step(x, thing=thing):
            return x * read(thing.kept)

        run = xs.compile(step) if device == "jax" else step
        results = [run(x).tolist() for _ in range(3)]
        change(thing)
        results += [run(x).tolist() for _ in range(3)]
        found[device] = results, thing.kept.tolist()
    assert found["jax"] == found["cpu"]


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
