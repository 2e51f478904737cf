"""Compiled steps give the results of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh, metrics

functional = torch.nn.functional


class Net(torch.nn.Module):
    """A small model with the things that matter to a replay: dropout, BatchNorm, a call count."""

    def __init__(self, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(16, 4)

    @property
    def calls(self) -> int:
        """How often forward ran in Python; a count in an attribute would be repeated or noticed."""
        return metrics.counters()["forward of Net"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        metrics.count("forward of Net")
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(1)
    return [
        (
            torch.from_numpy(rng.standard_normal((rows, 6)).astype(np.float32)),
            torch.from_numpy(rng.standard_normal((rows, 4)).astype(np.float32)),
        )
        for _ in range(count)
    ]


def make_step(model, optimizer, *, clip: float | None = None, parts: int = 1) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = functional.mse_loss(model(a), b) / parts
            loss.backward()
            total = total + loss.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return total

    return step


def train(
    device: str,
    make_optimizer: Callable[..., Any],
    *,
    compiled: bool = False,
    steps: int = 6,
    clip: float | None = None,
    parts: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the final state of a short training run."""
    model = net(**options).to(device)
    optimizer = make_optimizer(model.parameters())
    step = make_step(model, optimizer, clip=clip, parts=parts)
    step = xs.compile(step) if compiled else step
    losses = []
    for x, y in batches(steps):
        losses.append(step(x.to(device), y.to(device)))
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return [loss.item() for loss in losses], state


def same(got: Any, want: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=rtol)
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=rtol, atol=1e-6, err_msg=name)


# --- The same results ----------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def test_clipping_accumulation_and_batch_norm_give_the_results_of_the_cpu():
    options = {"clip": 0.1, "parts": 2, "norm": True, "steps": 4}
    got = train("jax", OPTIMIZERS["momentum"], compiled=True, **options)
    same(got, train("cpu", OPTIMIZERS["momentum"], **options), rtol=1e-4)


def test_dropout_draws_what_the_plain_step_draws():
    found = []
    for compiled in (False, True):
        options = {"dropout": 0.5, "steps": 2, "compiled": compiled}
        found.append((train("jax", OPTIMIZERS["momentum"], **options), torch.rand(4, device="jax")))
    (plain, after), (compiled, same_stream) = found
    same(compiled, plain)
    assert same_stream.tolist() == after.tolist()


def test_random_numbers_advance_from_call_to_call_and_follow_the_seed():
    dropout = torch.nn.Dropout(0.5)
    step = xs.compile(lambda x: dropout(x))
    x = torch.ones(64, device="jax")
    first = [step(x).tolist() for _ in range(4)]
    assert len({tuple(values) for values in first}) == 4
    torch.manual_seed(3)
    second = [step(x).tolist() for _ in range(2)]
    torch.manual_seed(3)
    assert [step(x).tolist() for _ in range(2)] == second


def test_a_step_on_a_mesh_is_one_program_and_keeps_layouts(counted):
    mesh = make_mesh((2, 4), ("x", "y"))
    plan = Plan({"first.weight": P("y", None), "last.weight": P(None, "y"), "*": P()})
    model = iso.shard(net(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = xs.compile(make_step(model, optimizer, clip=1.0))
    losses, compilations, executions = [], [], []
    for x, y in batches(4):
        losses.append(step(*(iso.shard(t, mesh, P("x", None)) for t in (x, y))))
        compilations.append(counted("compilations"))
        executions.append(counted("executions"))
    assert compilations[2:] == compilations[1:2] * 2
    assert np.diff(executions)[1:].tolist() == [1, 1]
    assert iso.to_jax(model.first.weight).sharding.spec == P("y")
    assert iso.to_jax(optimizer.state[model.last.weight]["exp_avg"]).sharding.spec == P(None, "y")
    want = train("cpu", OPTIMIZERS["adamw"], steps=4, clip=1.0)[0]
    np.testing.assert_allclose([loss.item() for loss in losses], want, rtol=1e-4)


def test_a_replay_donates(counted):
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.Adam(model.parameters())))
    (x, y) = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
    before = counted("donated_bytes")
    step(x, y)
    assert counted("donated_bytes") - before >= 3 * 4 * sum(p.numel() for p in model.parameters())
    assert counted("copies") == 0
