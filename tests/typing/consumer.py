# pyright: strict
"""A user's program, for the type checkers: pyright and mypy read it against the wheel, strictly.

It is never run. A public name that loses its type, or an argument that changes, fails `make types`.
"""

from pathlib import Path
from typing import assert_type, cast

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
    array: jax.Array = iso.shard(rows, mesh, P("x", None))
    assert_type(iso.full(iso.reshard(array, P())), jax.Array)
    assert_type(iso.local_shards(array), list[iso.sharding.Shard])
    sharding: NamedSharding = iso.sharding_of(array)
    picture: str = iso.visualize(array)
    print(sharding.spec, picture, iso.full(iso.reshard(array, P(None, "y"))))


def exchange(array: jax.Array, tensor: torch.Tensor) -> tuple[torch.Tensor, jax.Array]:
    return iso.to_torch(array, copy=None), iso.to_jax(tensor, copy=False)


def cross(model: torch.nn.Module, x: jax.Array) -> jax.Array:
    function = iso.jax_function(model)
    jitted = jax.jit(function)  # pyright: ignore (JAX does not say what jit returns)
    return cast(jax.Array, jitted(function.params, x))


def mark(tensor: torch.Tensor) -> None:
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    xs.mark_sharding(tensor, mesh, (0, None))
    xs.sync()
    xs.clear_sharding(tensor)


def namespaces() -> tuple[iso.rules.Linear, iso.sharding.Tiles]:
    return iso.rules.Linear(out="x"), iso.sharding.parse_op_sharding("{devices=[2]0,1}")


def errors() -> tuple[type[Exception], ...]:
    return (
        iso.ShardingError,
        iso.errors.SpecError,
        iso.errors.UnevenError,
        iso.errors.CopyError,
        iso.errors.DeviceError,
    )


def place(model: torch.nn.Module, mesh: Mesh) -> torch.nn.Module:
    return iso.shard(model, mesh, iso.Plan({"*.weight": P("x", None), "*": P()}))


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        value: torch.Tensor = loss.detach()
        return value

    return [step(x).item() for x in batches]


def keep(folder: Path, params: dict[str, jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    iso.save(folder, params)
    restored: dict[str, jax.Array] = iso.restore(
        folder, params, mesh=mesh, plan=iso.Plan({"*": P()})
    )
    return restored


def gelu(x: torch.Tensor) -> torch.Tensor:
    function = iso.torch_function(jax.nn.gelu)
    result: torch.Tensor = function(x)
    return result


def place_tensor(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return iso.reshard(iso.shard(x, mesh, P("x")), P())


def predict(params: dict[str, jax.Array]) -> iso.planner.Report:
    mesh = iso.planner.topology("v5e:16x16").mesh((16, 16), ("x", "y"))

    def step(params: dict[str, jax.Array]) -> jax.Array:
        return params["w"]

    return iso.planner.estimate(step, (params,), mesh, iso.Plan({"w": P("x", None)}))


def count() -> int:
    return len(iso.metrics.compilations())
