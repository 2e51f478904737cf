"""What follows from where arrays were placed: JAX's page on Auto axes, in its longer form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, TENSORS, Words, alike, table

AUTO = (AxisType.Auto,) * 2


@pytest.fixture
def mesh():
    """Auto axes; nothing is set."""
    return jax.make_mesh((4, 2), ("u", "v"), AUTO)


@pytest.mark.parametrize(("by", "spec"), [(OURS, P(("u", "v"), None)), (TENSORS, P(None, "u"))])
def test_layouts_and_what_is_computed_of_them(mesh, by, spec):
    def block(by: Words) -> Any:
        x = by.put(table(8, 8), NamedSharding(mesh, spec))
        return x, by.function(jnp.sin, torch.sin)(x)

    alike(block(by), block(JAX))


@pytest.mark.parametrize(
    ("by", "left", "right"),
    [(TENSORS, P("u", None), P(None, "v")), (OURS, P("u", "v"), P("v", None))],
)
def test_products(mesh, by, left, right):
    def block(by: Words) -> Any:
        x = by.put(table(8, 8), NamedSharding(mesh, left))
        y = by.put(table(8, 8, first=3), NamedSharding(mesh, right))
        return by.function(jnp.dot, torch.matmul)(x, y)

    alike(block(by), block(JAX))


def _meshes_that_disagree() -> dict[str, tuple[Mesh, Mesh]]:
    devices = np.array(jax.devices())
    names = ("u", "v")
    return {
        "other devices": (
            Mesh(devices[:4].reshape(2, 2), names),
            Mesh(devices[4:].reshape(2, 2), names),
        ),
        "another order": (
            Mesh(devices.reshape(4, 2), names),
            Mesh(devices[[0, 1, 2, 3, 6, 7, 4, 5]].reshape(4, 2), names),
        ),
    }


@pytest.mark.parametrize(
    ("name", "kind"), [("other devices", AxisType.Auto), ("another order", AxisType.Explicit)]
)
def test_arrays_on_meshes_that_disagree(name, kind):
    one, other = (
        Mesh(mesh.devices, mesh.axis_names, axis_types=(kind, kind))
        for mesh in _meshes_that_disagree()[name]
    )
    x, y = (OURS.put(table(8, 8), NamedSharding(mesh, P("u", "v"))) for mesh in (one, other))
    with pytest.raises(ValueError):
        x + y
    ours = r"add: the arguments are on different meshes.*of devices.*iso\.reshard"
    with pytest.raises(ValueError, match=ours if kind == AxisType.Explicit else "devices"):
        iso.jax_function(torch.add)(x, y)
    with pytest.raises(ValueError, match="devices"):
        iso.to_jax(iso.to_torch(x) + iso.to_torch(y))
    alike(iso.jax_function(torch.add)(x, iso.reshard(y, one, P("u", "v"))), x + x)


@pytest.mark.parametrize(("by", "kind"), [(TENSORS, AxisType.Auto), (OURS, AxisType.Explicit)])
def test_arrays_that_were_never_placed_go_anywhere(by, kind):
    typed = jax.make_mesh((4, 2), ("u", "v"), (kind, kind))

    def block(by: Words) -> Any:
        x = by.put(table(8, 8), NamedSharding(typed, P("u", "v")))
        add = by.function(jnp.add, torch.add)
        return add(x, jnp.ones_like(table(8, 8))), add(x, jnp.arange(64.0).reshape(8, 8))

    alike(block(by), block(JAX))


def test_random_numbers_are_drawn_where_they_are_used(mesh):
    def block(by: Words) -> Any:
        add = by.function(jnp.add, torch.add)

        @jax.jit
        def program(key: jax.Array, x: jax.Array) -> jax.Array:
            return add(x, jax.random.uniform(key, x.shape))

        x = by.put(table(24), NamedSharding(mesh, P(("u", "v"))))
        text = program.lower(jax.random.key(5), x).compile().as_text()
        return program(jax.random.key(5), x), "collective-permute" in text

    got = block(OURS)
    alike(got, block(JAX))
    assert not got[1]
