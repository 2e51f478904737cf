"""Laziness, one program per sync, the compile cache and donation."""

from __future__ import annotations

import gc

import jax
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


@pytest.mark.parametrize(
    "need",
    [
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
    ],
)
def test_needing_a_value_executes_once(need, counted):
    t = torch.ones(3, device="jax") * 2
    need(t)
    assert counted("executions") == 1


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


def test_sync_without_work_executes_nothing(counted):
    xs.sync()
    xs.sync(wait=True)
    dropped = torch.ones(3, device="jax") + 1
    del dropped
    xs.sync()
    assert counted("executions") == 0


def test_a_value_is_computed_once(counted):
    t = torch.ones(3, device="jax") * 2
    t.cpu(), t.cpu(), t.tolist(), (t.detach()).cpu()
    assert counted("executions") == 1


# --- One program per step, and no recompilation --------------------------------------------------


def test_a_training_step_is_one_program(counted, grid):
    model = iso.shard(mlp(), grid, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = (iso.shard(t, grid, P("x", None)) for t in batch())
    for _ in range(3):
        before = counted("executions")
        train_step(model, optimizer, x, y)
        assert counted("executions") == before
        xs.sync()
        assert counted("executions") == before + 1
    assert counted("fallbacks") == 0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_recompilation_after_the_second_step_with_a_schedule(name, counted, grid):
    model = iso.shard(mlp(), grid, PLAN)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    losses, compiled = [], []
    for number in range(8):
        x, y = (iso.shard(t, grid, P("x", None)) for t in batch(number % 2))
        losses.append(train_step(model, optimizer, x, y))
        schedule.step()
        xs.sync()
        compiled.append(counted("compilations"))
    assert compiled[2:] == compiled[1:2] * 6, metrics.report()
    assert all(np.isfinite(loss.item()) for loss in losses)


def test_the_same_work_twice_compiles_once(counted):
    for number in (1.0, 2.0, 7.0):
        t = torch.full((5,), 3.0).to("jax")
        assert (t * number + number / 3).sum().item() == pytest.approx(
            5 * (3.5 * number - number / 6)
        )
    assert counted("compilations") <= 3


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


def test_a_dead_input_that_fits_no_result_is_no_reason_to_warn():
    x = torch.arange(4.0).to("jax") + 1
    xs.sync()
    y = x.sum()
    del x
    xs.sync()
    assert y.item() == 10


def test_a_training_step_donates_parameters_and_state(counted, grid):
    model = iso.shard(mlp(), grid, PLAN, copy=True)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = (iso.shard(t, grid, P("x", None)) for t in batch())
    for _ in range(3):
        train_step(model, optimizer, x, y)
        xs.sync()
    before = counted("donated_bytes")
    train_step(model, optimizer, x, y)
    xs.sync()
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert counted("donated_bytes") - before >= 3 * weights


HOLDERS = {
    "jax array": (lambda t: iso.to_jax(t), np.asarray),
    "shards": (lambda t: t.local_shards, lambda held: np.concatenate([s.data for s in held])),
    "core shards": (
        lambda t: iso.local_shards(t, framework="torch"),
        lambda held: np.concatenate([s.data for s in held]),
    ),
    "numpy": (lambda t: t.numpy(), np.asarray),
    "asarray": (lambda t: np.asarray(t), np.asarray),
    "cpu": (lambda t: t.cpu(), np.asarray),
    "clone": (lambda t: t.clone(), np.asarray),
    "shard's numpy": (
        lambda t: [s.data.numpy() for s in t.local_shards],
        lambda held: np.concatenate(held),
    ),
    "first shard": (
        lambda t: [t.local_shards[0].data, *[s.data for s in t.local_shards[1:]]],
        lambda held: np.concatenate(held),
    ),
    "detached and synced": (lambda t: _synced(t.detach().clone()), np.asarray),
}


def _synced(t: torch.Tensor) -> torch.Tensor:
    xs.sync()
    return t


@pytest.mark.parametrize("name", HOLDERS)
def test_donation_never_takes_what_a_user_holds(name, grid):
    take, read = HOLDERS[name]
    t = xs.mark_sharding(torch.arange(64.0).to("jax") + 0, grid, (("x", "y"),))
    xs.sync()
    held = take(t)
    for _ in range(3):
        t.mul_(2)
        xs.sync()
        gc.collect()
    np.testing.assert_array_equal(read(held), np.arange(64.0))
    np.testing.assert_array_equal(t.cpu(), np.arange(64.0) * 8)


def test_donation_never_takes_an_array_that_came_from_jax(mesh):
    a = jax.device_put(np.arange(64.0, dtype=np.float32), jax.NamedSharding(mesh, P("x")))
    t = iso.to_torch(a)
    for _ in range(2):
        t.add_(1)
        xs.sync()
    np.testing.assert_array_equal(a, np.arange(64.0))
    assert t[0].item() == 2


def test_donation_never_takes_host_memory_that_torch_still_has(grid):
    host = torch.arange(128.0).reshape(8, 16)
    t = iso.shard(host, grid, P(("x", "y"), None))
    for _ in range(3):
        t.mul_(0)
        xs.sync()
    assert torch.equal(host, torch.arange(128.0).reshape(8, 16))


def test_one_array_behind_two_tensors_is_not_donated(mesh):
    a = iso.shard(np.arange(64, dtype=np.float32), mesh, P("x"))
    first, second = iso.to_torch(a), iso.to_torch(a)
    del a
    first.add_(1)
    xs.sync()
    first.add_(1)
    xs.sync()
    assert second[1].item() == 1 and first[1].item() == 3


def test_a_saved_tensor_for_backward_survives_a_sync_in_between():
    x = torch.full((4,), 3.0, device="jax", requires_grad=True)
    y = (x * 1.0).pow(3)
    xs.sync()
    z = y.sin().sum()
    xs.sync()
    z.backward()
    np.testing.assert_allclose(x.grad.cpu(), np.cos(27.0) * 27 * np.ones(4), rtol=1e-4)


def test_many_steps_that_nobody_waits_for(grid):
    layer = iso.shard(torch.nn.Linear(256, 256), grid, {"weight": P("x", "y")})
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    x = iso.shard(torch.ones(64, 256), grid, P(None, "y"))
    for _ in range(100):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        xs.sync()
    assert torch.isfinite(layer.weight.sum()).item()
