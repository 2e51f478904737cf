"""Users' functions traced under Auto axes, where the compiler propagates shardings.

Over Explicit axes JAX raises for an operation whose result's sharding is ambiguous, which most
models contain. So isoshard traces users' functions over the same grid with Auto axes; no value
moves for it, and the results go back to the user's mesh.

>>> import jax.numpy as jnp
>>> from jax.sharding import NamedSharding, PartitionSpec as P
>>> mesh = jax.make_mesh((8,), ("x",))                               # Explicit axes
>>> x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))
>>> f = on_auto_axes(lambda x: x.T @ x)                              # a sum over a split axis
>>> y = jax.jit(f, out_shardings=NamedSharding(mesh, P(None, "x")))(x)
>>> jax.typeof(y), float(y.max())
(ShapedArray(float32[8,8@x]), 8.0)
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from isoshard.core.layout.axis_types import auto, is_typed, same_grid, under_auto


def on_auto_axes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed over Auto axes, whatever the types of its arguments and results.

    Args:
        fn: of pytrees of arrays. It sees the mesh of `jax.set_mesh` with Auto axes.

    Returns:
        A function to be traced; its results are on Auto axes.
    """

    @functools.wraps(fn)
    def computed(*args: Any) -> Any:
        with axes_of(auto(jax.sharding.get_abstract_mesh())):
            return on_auto(fn(*on_auto(args)))

    return computed


def on_auto(tree: Any) -> Any:
    """A pytree whose arrays are on Auto axes; other leaves are unchanged."""
    return jax.tree.map(lambda x: under_auto(x) if isinstance(x, jax.Array) else x, tree)


@contextlib.contextmanager
def axes_of(mesh: Any) -> Iterator[None]:
    """Give the mesh of `jax.set_mesh` the axis types of `mesh`, if it is the same grid.

    JAX compares the types of values with those of the mesh that is set. Where none is set, or
    another grid, nothing changes.

    Args:
        mesh: with devices, or abstract.
    """
    current = jax.sharding.get_abstract_mesh()
    if current.empty or not same_grid(current, mesh):
        yield
        return
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    with jax.sharding.use_abstract_mesh(abstract):
        yield


@contextlib.contextmanager
def hint(mesh: Mesh) -> Iterator[None]:
    """Add to JAX's sharding errors a note on the axis types that a step's loss is traced under."""
    try:
        yield
    except Exception as error:
        if is_typed(mesh) and re.search("mesh|shard|PartitionSpec", str(error)):
            error.add_note(
                "The mesh has Explicit axes, and the loss is traced under Auto ones. If it is "
                "written for Explicit axes, use train_step(.., explicit=True). Pass arrays that it "
                "closes over as arguments of the step: step(state, *batch)."
            )
        raise
