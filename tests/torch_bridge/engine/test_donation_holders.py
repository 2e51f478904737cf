"""Memory that somebody still holds is never given away, whoever holds it and however."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh, metrics

NUMBERS = np.arange(16.0, dtype=np.float32).reshape(8, 2)


def placed() -> torch.Tensor:
    """A tensor whose buffers the engine alone holds."""
    tensor = torch.from_numpy(NUMBERS.copy()).to("jax") * 1
    xs.sync()
    return tensor


def on_mesh() -> torch.Tensor:
    tensor = iso.shard(torch.from_numpy(NUMBERS.copy()), make_mesh((8,), ("x",)), P("x")) * 1
    xs.sync()
    return tensor


def seen_by_a_function(tensor: torch.Tensor) -> Any:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    iso.torch_function(keep)(tensor)
    return [x for x in kept if not isinstance(x, jax.core.Tracer)]


def saved_for_backward(tensor: torch.Tensor) -> Any:
    weight = torch.ones(2, device="jax", requires_grad=True)
    return (tensor.clone() * weight).sum()


def marked(tensor: torch.Tensor) -> Any:
    held = iso.to_jax(tensor)
    xs.mark_sharding(tensor, xs.Mesh(range(8), (8,), ("x",)), (None, None))
    return held


def whole_on_a_mesh(tensor: torch.Tensor) -> Any:
    mesh = make_mesh((8,), ("x",))
    return iso.to_jax(tensor, jax.sharding.NamedSharding(mesh, P()))


def numbers_of(held: Any) -> Any:
    """What is held, as NumPy arrays."""
    if isinstance(held, torch.Tensor):
        if held.requires_grad:
            held.backward()
            return None
        return held.detach().cpu().numpy()
    if isinstance(held, list):
        return [numbers_of(one) for one in held]
    if hasattr(held, "data") and hasattr(held, "index") and not isinstance(held, jax.Array):
        return np.asarray(held.data)
    return np.array(held)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": iso.to_jax,
    "shards": iso.local_shards,
    "shards as torch": lambda tensor: [s.data for s in tensor.local_shards],
    "clone": lambda tensor: tensor.clone(),
    "copied into another": lambda tensor: torch.empty_like(tensor).copy_(tensor),
    "saved for backward": saved_for_backward,
    "waiting": lambda tensor: tensor * 2,
    "marked": marked,
    "a tensor of its array": lambda tensor: iso.to_torch(iso.to_jax(tensor)),
    "resharded": lambda tensor: iso.shard(tensor, make_mesh((8,), ("x",)), P()),
    "whole on a mesh": whole_on_a_mesh,
    "seen by a function": seen_by_a_function,
}
ON_ONE = HOLDERS | {"capsule": jax.dlpack.from_dlpack, "cpu": lambda tensor: tensor.cpu()}


def add_lazily(tensor: torch.Tensor) -> None:
    tensor.add_(1)
    xs.sync()


def add_captured(tensor: torch.Tensor) -> None:
    xs.compile(lambda: tensor.add_(1).sum())()


@pytest.mark.parametrize(
    ("make", "hold", "write"),
    [
        *((placed, hold, (add_lazily, add_captured)[n % 2]) for n, hold in enumerate(ON_ONE)),
        *(
            (on_mesh, hold, (add_captured, add_lazily)[n % 2])
            for n, hold in enumerate([*HOLDERS][1::2])
        ),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_is_held_survives_a_write(make, hold, write):
    tensor = make()
    held = ON_ONE[hold](tensor)
    twin = numbers_of(ON_ONE[hold](make()))
    for n in range(1, 3):
        write(tensor)
        gc.collect()
        np.testing.assert_array_equal(tensor.detach().cpu().numpy(), NUMBERS + n)
    found = numbers_of(held)
    if twin is not None:
        jax.tree.map(np.testing.assert_array_equal, found, twin)


@pytest.mark.parametrize("make", [placed, on_mesh])
def test_memory_that_nobody_holds_is_given_away_and_never_copied(make):
    tensor = make()
    assert iso.to_jax(tensor.clone()).shape == (8, 2)
    before = metrics.counters().get("donated_bytes", 0)
    add_lazily(tensor)
    assert metrics.counters().get("donated_bytes", 0) - before == NUMBERS.nbytes
    step = xs.compile(lambda: tensor.add_(1).sum())
    step()
    before = metrics.counters().get("copies", 0)
    for _ in range(3):
        step()
    assert metrics.counters().get("copies", 0) == before
    held = iso.to_jax(tensor)
    for _ in range(2):
        step()
        assert metrics.counters().get("copies", 0) == before + 1
    np.testing.assert_array_equal(np.array(held), NUMBERS + 5)


def test_two_memories_with_one_value_are_written_apart():
    one, two = placed(), placed()
    two.copy_(one)
    xs.sync()
    step = xs.compile(lambda: one.add_(1).sum())
    step()
    step()
    np.testing.assert_array_equal(two.cpu().numpy(), NUMBERS)
    two.add_(5)
    xs.sync()
    np.testing.assert_array_equal(one.cpu().numpy(), NUMBERS + 2)


def test_an_array_of_jax_and_memory_of_the_host_are_never_taken(mesh):
    a = jax.device_put(NUMBERS, jax.NamedSharding(mesh, P("x")))
    host = torch.from_numpy(NUMBERS.copy())
    first, second, third = iso.to_torch(a), iso.to_torch(a), iso.shard(host, mesh, P("x"))
    for n in range(1, 3):
        first.add_(1)
        third.mul_(0)
        xs.sync()
        np.testing.assert_array_equal(a, NUMBERS)
        np.testing.assert_array_equal(first.numpy(), NUMBERS + n)
    np.testing.assert_array_equal(second.numpy(), NUMBERS)
    np.testing.assert_array_equal(host, NUMBERS)


def test_a_value_in_a_cycle_is_computed_until_it_is_collected():
    x = placed()
    gc.disable()
    try:
        holder: list[Any] = [x + 1]
        holder.append(holder)
        seen = weakref.ref(holder[0]._storage.value)
        del holder
        xs.sync()
        value = seen()
        assert value is not None and value.array is not None
        del value
    finally:
        gc.enable()
    gc.collect()
    assert seen() is None


def test_an_escaped_tensor_in_a_cycle_is_collected_before_the_step_is_refused():
    x = placed()

    def step() -> torch.Tensor:
        holder: list[Any] = [x + 1]
        holder.append(holder)
        return x.sum()

    gc.disable()
    try:
        compiled = xs.compile(step)
        assert compiled().item() == NUMBERS.sum() and compiled().item() == NUMBERS.sum()
        assert len(compiled.replays) == 1
    finally:
        gc.enable()
