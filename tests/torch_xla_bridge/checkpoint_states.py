"""State dicts that the tests of checkpoints save, and how they compare them."""

from __future__ import annotations

import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.spmd import Mesh, mark_sharding

LAYOUTS = [
    ((8,), ("x",), ("x", None)),
    ((8,), ("x",), (None, "x")),
    ((2, 4), ("x", "y"), ("x", "y")),
    ((4, 2), ("x", "y"), ("y", "x")),
    ((2, 4), ("x", "y"), (("y", "x"), None)),
    ((2, 4), ("x", "y"), (None, "x")),
    ((2, 2, 2), ("x", "y", "z"), (("x", "z"), None)),
    ((8,), ("x",), (None, None)),
]
"""Mesh shape, axis names and spec of a matrix."""


def place(tensor, layout):
    """A tensor on the device, marked; `None` leaves it unmarked."""
    on_device = tensor.to("jax")
    if layout is None:
        return on_device
    shape, names, spec = layout
    return mark_sharding(on_device, Mesh(range(8), shape, names), spec)


def numbers(*shape, seed=0, dtype=torch.float32):
    """Random numbers that depend on nothing else."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def small_state(seed, layout=LAYOUTS[2]):
    """A sharded tensor, one of another kind, a CPU tensor and an object."""
    return {
        "weight": place(numbers(8, 16, seed=seed), layout),
        "count": torch.tensor([seed, 7]).to("jax"),
        "host": numbers(5, seed=seed + 100),
        "rest": {"epoch": seed, "name": f"run {seed}"},
    }


def empty_state(layout=LAYOUTS[1]):
    """What `small_state` can be restored into."""
    return {
        "weight": place(torch.zeros(8, 16), layout),
        "count": torch.zeros(2, dtype=torch.int64).to("jax"),
        "host": torch.zeros(5),
        "rest": {"epoch": -1, "name": ""},
    }


def same(left, right):
    """Whether two state dicts hold the same, bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        left, right = left.detach().cpu(), right.detach().cpu()
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def plain_state(seed):
    """CPU tensors and an object: what storages are tested with."""
    return {"w": numbers(9, 16, seed=seed), "n": seed}


def restored(manager, step, layout=LAYOUTS[1]):
    """The state dict of a step, as another layout reads it."""
    state = empty_state(layout)
    manager.restore(step, state)
    xs.sync()
    return state


def plainly_restored(manager, step):
    """The same for `plain_state`."""
    state = {"w": torch.zeros(9, 16), "n": -1}
    manager.restore(step, state)
    return state
