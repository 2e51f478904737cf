"""Loops over places of a tensor compile a program or two, whatever the number of places."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, metrics
from isoshard.torch_bridge.engine.compiling import recompile_reasons

N = 8


def compiled(work: Callable[[], Any]) -> list[str]:
    """The causes of the compilations that some work made."""
    xs.sync()
    before = len(metrics.compilations())
    work()
    xs.sync()
    return [one.cause for one in metrics.compilations()[before:]]


def on_device(x: Any, spec: P | None) -> Any:
    if spec is None:
        return x.to("jax")
    return iso.shard(copy.deepcopy(x), iso.make_mesh((4,), ("data",)), spec)


def train(data: Any, pieces: Callable[[Any], Any], spec: P | None = None) -> list[float]:
    """Losses of a small model trained on pieces of some data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    if data.device.type == "jax":
        model = on_device(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for x in pieces(data):
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LOOPS = {
    "iteration": lambda data: data,
    "index": lambda data: (data[i] for i in range(N)),
    "slice": lambda data: (data[2 * i : 2 * (i + 1)] for i in range(N // 2)),
    "slice_with_a_step": lambda data: (data[i : i + 3 : 2] for i in range(N - 2)),
    "split": lambda data: data.split(2),
    "permuted": lambda data: (data.permute(1, 0, 2)[i] for i in range(4)),
    "merged": lambda data: (data[2 * i : 2 * i + 2].flatten(0, 1) for i in range(N // 2)),
    "two_pieces": lambda data: (data[i] + data[i - 1] for i in range(N)),
}

SPECS = (None, P(), P(None, "data"))


@pytest.mark.parametrize(
    ("loop", "spec"),
    list(zip(LOOPS, (None, P(), None, P(), SPECS[2], P(), SPECS[2], None), strict=True)),
    ids=str,
)
def test_a_training_loop_over_places(loop, spec):
    torch.manual_seed(1)
    data = torch.randn(N, 4, 8)
    want = train(data, LOOPS[loop])
    there, got = on_device(data, spec), []
    causes = compiled(lambda: got.extend(train(there, LOOPS[loop], None if spec is None else P())))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert len(causes) <= 2


def test_two_indices_start_to_move_one_after_the_other():
    x = torch.arange(24.0).view(4, 6)
    there = x.to("jax")

    def read():
        for i in range(4):
            for j in range(6):
                assert (there[i, j] + 1).item() == x[i, j].item() + 1

    causes = compiled(read)
    assert causes[1:] == ["a place that changed: an input from now on"] * 2


def test_places_that_stay_are_no_inputs():
    weight = torch.randn(12, 5)
    there = weight.to("jax")

    def products():
        for n in range(5):
            x = torch.full((3, 5), float(n))
            got = sum((x.to("jax") @ part.t()).sum() for part in there.chunk(3))
            want = sum((x @ part.t()).sum() for part in weight.chunk(3))
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)

    assert len(compiled(products)) == 1


@pytest.mark.parametrize("spec", [None, P(None, "data")], ids=str)
def test_gradients_through_an_index_and_a_slice(spec):
    x = torch.randn(N, 8)
    there = on_device(x, spec).requires_grad_()

    def step(x, i):
        x.grad = None
        piece = x[i].sin() * x[i, 3] if spec else x[i : i + 3, ::2] ** 2
        piece.sum().backward()
        return x.grad

    def steps():
        for i in range(N - 2):
            want = step(x.requires_grad_(), i)
            torch.testing.assert_close(step(there, i).cpu(), want)

    assert len(compiled(steps)) <= 3


def write_rows(x, i):
    x[i] += 1.5
    x[i].mul_(2.0)


WRITES = {
    "rows": write_rows,
    "slices": lambda x, i: x[i - i % 2 : i - i % 2 + 2].add_(1.0),
    "column": lambda x, i: x[:, i].add_(0.5),
    "fill": lambda x, i: x[i].fill_(3.0),
    "copy": lambda x, i: x[i].copy_(x[i - 1]),
    "one_element": lambda x, i: x[i, i].add_(1.25),
    "through_t": lambda x, i: x.t()[i].sub_(0.5),
    "row_of_a_view": lambda x, i: x.view(N, 2, 4)[i, 1].add_(2.0),
}


@pytest.mark.parametrize(
    ("write", "spec"),
    [
        *zip(WRITES, (*SPECS, P("data"), *SPECS, None), strict=True),
        ("rows", P(None, "data")),
    ],
    ids=str,
)
def test_writes_reach_the_memory_that_others_see(write, spec):
    write = WRITES[write]
    x = torch.randn(N, 8)
    there = on_device(x, spec)
    row, version = there[2], there._version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", iso.RecompilationWarning)

        def writes():
            for i in range(5):
                write(x, i)
                write(there, i)
                there.sum().item()

        causes = compiled(writes)
    torch.testing.assert_close(there.cpu(), x)
    torch.testing.assert_close(row.cpu(), x[2])
    assert there._version > version
    if spec is None or (spec == P(None, "data") and write is write_rows):
        assert len(causes) <= 3


def test_single_places_of_a_split_axis_are_written_by_one_program():
    there, expected = on_device(torch.zeros(N, 4), P("data")), torch.zeros(N, 4)

    def writes():
        for i in range(N):
            there[i] = torch.tensor(float(i)).to("jax")
            expected[i] = float(i)
            torch.testing.assert_close(there.sum().cpu(), expected.sum())

    assert len(compiled(writes)) <= 2
    torch.testing.assert_close(there.cpu(), expected)


def test_places_beside_blocks_of_unequal_sizes():
    x = torch.randn(N, 30, 4)
    there = iso.shard(x, iso.make_mesh((4,), ("data",)), P(None, "data"), uneven="pad")

    def read():
        for i in range(N):
            torch.testing.assert_close((there[i] * 2.0).cpu(), x[i] * 2.0)

    assert len(compiled(read)) == 2


def test_a_split_axis_stays_static_and_is_told(monkeypatch):
    monkeypatch.setattr(recompile_reasons, "ENDLESS", 0.0)
    monkeypatch.setattr(recompile_reasons, "_FAMILIES", {})
    x = torch.randn(16, 4)
    there = on_device(x, P("data"))
    with pytest.warns(iso.RecompilationWarning, match="another place in view.*index with a tensor"):
        for i in range(10):
            np.testing.assert_allclose((there[i].atanh() + 1).numpy(), x[i].atanh() + 1, rtol=1e-4)

    def by_tensor():
        for i in range(10):
            got = there[torch.tensor([i])].atanh()
            np.testing.assert_allclose(got.numpy(), x[i : i + 1].atanh(), rtol=1e-4)

    assert len(compiled(by_tensor)) == 1


def test_compiled_steps_tell_of_arguments_at_other_places():
    data = torch.randn(10, 4)
    there = data.to("jax")
    step = xs.compile(lambda x: (x * 2).sum())
    with pytest.warns(iso.RecompilationWarning, match=r"another slice of a tensor.*\.clone\(\)"):
        for i in range(10):
            assert step(there[i]).item() == pytest.approx((data[i] * 2).sum().item(), abs=1e-5)
    again = xs.compile(lambda x: (x * 3).sum())

    def clones():
        for i in range(10):
            assert again(there[i].clone()).item() == pytest.approx(
                (data[i] * 3).sum().item(), abs=1e-5
            )

    assert len(compiled(clones)) <= 3 and len(again.replays) == 1
