"""Arrays on meshes with Explicit axes, and their types as JAX writes them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AMBIENT = pytest.mark.parametrize("typed", ["alone", "under set_mesh"], indirect=True)


@pytest.fixture
def typed(request):
    """A mesh as `jax.make_mesh` makes it; by `AMBIENT` also one that is set."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    if getattr(request, "param", "alone") == "alone":
        yield mesh
    else:
        with jax.set_mesh(mesh):
            yield mesh


def grid(*kinds: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def on(mesh: jax.sharding.Mesh, array: Any, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Any, want: Any, *, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=rtol / 10)


def type_of(x: Any) -> str:
    """As JAX writes it: `f32[8@x,4]`."""
    return jax.typeof(x).str_short(short_dtypes=True)
