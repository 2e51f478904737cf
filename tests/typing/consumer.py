"""A user's program, for the type checker: pyright reads it against the installed wheel.

It is never run. A public name that loses its type, or an argument that changes, fails `make types`.
"""

from typing import assert_type

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P


def lay_out(rows: np.ndarray) -> None:
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    assert_type(mesh, Mesh)
    array = iso.shard(rows, mesh, P("x", None))
    assert_type(iso.local_shards(array), list[iso.Shard])
    sharding: NamedSharding = iso.sharding_of(array)
    picture: str = iso.visualize(array)
    print(sharding.spec, picture, iso.full(iso.reshard(array, P(None, "y"))))


def exchange(array: jax.Array, tensor: torch.Tensor) -> tuple[torch.Tensor, jax.Array]:
    return iso.to_torch(array, copy=None), iso.to_jax(tensor, copy=False)


def cross(model: torch.nn.Module, x: jax.Array) -> jax.Array:
    function = iso.jax_function(model)
    return jax.jit(function)(function.params, x)


def mark(tensor: torch.Tensor) -> None:
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    xs.mark_sharding(tensor, mesh, (0, None))
    xs.sync()
    xs.clear_sharding(tensor)


def errors() -> tuple[type[Exception], ...]:
    return iso.ShardingError, iso.SpecError, iso.UnevenError, iso.CopyError, iso.DeviceError


def place(model: torch.nn.Module, mesh: Mesh) -> torch.nn.Module:
    return iso.shard(model, mesh, iso.Plan({"*.weight": P("x", None), "*": P()}))
