"""Laziness, one program per sync, the compile cache and donation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, metrics


@pytest.fixture
def grid() -> xs.Mesh:
    """The mesh of torch_xla's users."""
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


PLAN = Plan({"0.weight": P("y", None), "0.bias": P("y"), "2.weight": P(None, "y"), "*": P()})


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    return draw(8, 8), draw(8, 4)


def train_step(model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


# --- Laziness ------------------------------------------------------------------------------------


def test_nothing_executes_before_a_value_is_needed(counted):
    x = torch.arange(12.0, device="jax").reshape(3, 4)
    y = (x @ x.t()).relu().add_(1)[1:].sum(0)
    y.requires_grad_()
    (y.exp() / 1e3).sum().backward()
    assert y.grad.shape == y.shape and y.dtype == torch.float32 and y.stride() == (1,)
    assert x.is_contiguous() and len(x) == 3 and x.device.type == "jax"
    assert counted("executions") == counted("transfers.device_to_host") == 0
    y.grad.cpu()
    assert counted("executions") == counted("transfers.device_to_host") == 1


NEEDS = (
    lambda t: t.cpu(),
    lambda t: t.numpy(),
    lambda t: t.tolist(),
    lambda t: t.sum().item(),
    lambda t: bool(t.sum() > 0),
    lambda t: float(t.sum()),
    lambda t: repr(t),
    lambda t: f"{t.sum():.2f}",
    lambda t: iso.to_jax(t),
    lambda t: np.asarray(t),
    lambda t: torch.equal(t, t + 0),
    lambda t: t.to("cpu"),
    lambda t: iso.local_shards(t),
    lambda t: torch.zeros(3).copy_(t),
)


def test_needing_a_value_executes_once(counted):
    for n, need in enumerate(NEEDS):
        t = torch.ones(3, device="jax") * 2
        need(t)
        assert counted("executions") == n + 1
    before = counted("executions")
    t = torch.ones(3, device="jax") * 2
    t.cpu(), t.cpu(), t.tolist(), (t.detach()).cpu()
    assert counted("executions") == before + 1
    xs.sync(wait=True)
    dropped = torch.ones(3, device="jax") + 1
    del dropped
    xs.sync()
    assert counted("executions") == before + 1


def test_marking_executes_nothing_and_moves_nothing(counted, grid):
    xs.sync()  # what other tests have marked and never used
    metrics.reset()
    x = torch.ones(8, 4).to("jax")
    t = xs.mark_sharding(x, grid, ("x", "y"))
    u = xs.mark_sharding(x * 2, grid, ("y", "x"))
    assert t.partition_spec == u.partition_spec.__class__("x", "y")
    assert tuple(u.partition_spec) == ("y", "x")
    assert (u + 1).local_shards is None
    assert counted("executions") == counted("transfers.host_to_device") == 0
    xs.sync()
    assert len(t.local_shards) == len(u.local_shards) == 8
    assert counted("executions") == 1 and counted("transfers.host_to_device") == 1


# --- One program per step, and no recompilation --------------------------------------------------


def test_a_training_step_is_one_program_that_donates_its_state(counted, grid):
    model = iso.shard(mlp(), grid, PLAN, copy=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    losses, compiled = [], []
    for number in range(5):
        x, y = (iso.shard(t, grid, P("x", None)) for t in batch(number % 2))
        before, donated = counted("executions"), counted("donated_bytes")
        losses.append(train_step(model, optimizer, x, y))
        schedule.step()
        assert counted("executions") == before
        xs.sync()
        assert counted("executions") == before + 1
        compiled.append(counted("compilations"))
    assert compiled[2:] == compiled[1:2] * 3, metrics.report()
    assert counted("fallbacks") == 0
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert counted("donated_bytes") - donated >= 3 * weights
    assert all(np.isfinite(loss.item()) for loss in losses)


def test_changing_floats_are_no_reason_to_compile(counted):
    t = torch.ones(5, device="jax")
    xs.sync()
    metrics.reset()
    results = []
    for number in (0.5, 1.5, -2.0):
        t2 = t.mul(number).add(t, alpha=number)
        xs.sync()
        results.append(t2)
    assert counted("compilations") == 1 and counted("executions") == 3
    assert [r[0].item() for r in results] == [1.0, 3.0, -4.0]


def test_metrics_say_why_and_where(counted, grid):
    (torch.ones(8, 4).to("jax").sin() * 2).cpu()
    (torch.ones(6, 4).to("jax").sin() * 2).cpu()
    y = xs.mark_sharding(torch.ones(8, 4).to("jax"), grid, ("x", None))
    (y.sin() * 2).cpu()
    (y.cos() * 2).cpu()
    causes = [c.cause for c in metrics.compilations()]
    assert "shape" in causes[1] and "[6, 4]" in causes[1], causes
    assert "sharding" in causes[2], causes
    assert "operation" in causes[3], causes
    assert all(c.where.startswith("test_sync.py:") for c in metrics.compilations())
    assert "test_sync.py" in metrics.report()


# --- Donation ------------------------------------------------------------------------------------


def test_dead_inputs_are_donated_and_their_memory_is_used_again(counted):
    t = torch.zeros(1024, device="jax")
    xs.sync()
    for _ in range(3):
        t.add_(1)
        xs.sync()
    assert counted("donated_bytes") >= 2 * 4096
    assert t.tolist() == [3.0] * 1024
    total = t.sum()  # the dead input fits no result: no reason to warn
    del t
    assert total.item() == 3 * 1024


def test_a_saved_tensor_for_backward_survives_a_sync_in_between():
    x = torch.full((4,), 3.0, device="jax", requires_grad=True)
    y = (x * 1.0).pow(3)
    xs.sync()
    z = y.sin().sum()
    xs.sync()
    z.backward()
    np.testing.assert_allclose(x.grad.cpu(), np.cos(27.0) * 27 * np.ones(4), rtol=1e-4)
