"""Memory that somebody still holds is never given away, whoever holds it and however."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
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


def array(tensor: torch.Tensor) -> Any:
    return iso.to_jax(tensor)


def shards(tensor: torch.Tensor) -> Any:
    return iso.local_shards(tensor)


def capsule(tensor: torch.Tensor) -> Any:
    return jax.dlpack.from_dlpack(tensor)


def seen_by_a_function(tensor: torch.Tensor) -> Any:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    iso.torch_function(keep)(tensor)
    return [x for x in kept if not isinstance(x, jax.core.Tracer)]


def clone(tensor: torch.Tensor) -> Any:
    return tensor.clone()


def copied_into_another(tensor: torch.Tensor) -> Any:
    return torch.empty_like(tensor).copy_(tensor)


def saved_for_backward(tensor: torch.Tensor) -> Any:
    weight = torch.ones(2, device="jax", requires_grad=True)
    return (tensor.clone() * weight).sum()


def waiting(tensor: torch.Tensor) -> Any:
    return tensor * 2


def marked(tensor: torch.Tensor) -> Any:
    held = iso.to_jax(tensor)
    xs.mark_sharding(tensor, xs.Mesh(range(8), (8,), ("x",)), (None, None))
    return held


def in_jax_tensor(tensor: torch.Tensor) -> Any:
    return iso.to_torch(iso.to_jax(tensor))


def whole_on_a_mesh(tensor: torch.Tensor) -> Any:
    mesh = make_mesh((8,), ("x",))
    return iso.to_jax(tensor, jax.sharding.NamedSharding(mesh, P()))


def resharded(tensor: torch.Tensor) -> Any:
    return iso.shard(tensor, make_mesh((8,), ("x",)), P())


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


HOLDERS: list[Callable[[torch.Tensor], Any]] = [
    array,
    shards,
    clone,
    copied_into_another,
    saved_for_backward,
    waiting,
    marked,
    in_jax_tensor,
    resharded,
    whole_on_a_mesh,
    seen_by_a_function,
]
ON_ONE = [*HOLDERS, capsule]


def add_lazily(tensor: torch.Tensor) -> None:
    tensor.add_(1)
    xs.sync()


def add_captured(tensor: torch.Tensor) -> None:
    xs.compile(lambda: tensor.add_(1).sum())()


@pytest.mark.parametrize("write", [add_lazily, add_captured])
@pytest.mark.parametrize(
    ("make", "hold"),
    [*((placed, hold) for hold in ON_ONE), *((on_mesh, hold) for hold in HOLDERS)],
    ids=lambda one: one.__name__,
)
def test_what_is_held_survives_a_write(make, hold, write):
    tensor = make()
    held = hold(tensor)
    twin = numbers_of(hold(make()))
    write(tensor)
    gc.collect()
    found = numbers_of(held)
    if twin is not None:
        jax.tree.map(np.testing.assert_array_equal, found, twin)
    np.testing.assert_array_equal(tensor.detach().cpu().numpy(), NUMBERS + 1)


@pytest.mark.parametrize("make", [placed, on_mesh])
def test_memory_that_nobody_holds_is_given_away(make):
    tensor = make()
    last = iso.to_jax(tensor.clone())
    assert last.shape == (8, 2)
    before = metrics.counters().get("donated_bytes", 0)
    add_lazily(tensor)
    assert metrics.counters().get("donated_bytes", 0) - before == NUMBERS.nbytes


@pytest.mark.parametrize("make", [placed, on_mesh])
def test_a_replay_copies_nothing_that_nobody_holds(make):
    tensor = make()
    step = xs.compile(lambda: tensor.add_(1).sum())
    step()
    before = metrics.counters().get("copies", 0)
    for _ in range(3):
        step()
    assert metrics.counters().get("copies", 0) == before
    held = iso.to_jax(tensor)
    step()
    assert metrics.counters().get("copies", 0) == before + 1
    step()
    assert metrics.counters().get("copies", 0) == before + 1
    np.testing.assert_array_equal(np.array(held), NUMBERS + 4)


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


def test_a_result_that_nobody_holds_is_not_computed():
    x = placed()
    kept = x + 1
    for _ in range(5):
        x * 3
    xs.sync()
    tape_result = kept._storage.value
    assert tape_result.array is not None
    assert weakref.ref(tape_result)() is tape_result


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


def test_nothing_counts_references():
    room = Path(xs.__file__).parent
    found = [path for path in room.rglob("*.py") if "getrefcount" in path.read_text()]
    assert found == []
