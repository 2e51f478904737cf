"""Code of others traced under Auto axes: a plan tells the layouts, the compiler completes the rest.

Along Explicit axes JAX refuses an operation that leaves the layout of its result open, and most
models leave it open. So what isoshard traces for a user is traced over the same grid with Auto
axes; no value moves for it, and the results go back to the user's mesh.

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
    """The function computed along Auto axes, whatever the types of its arguments and results.

    Args:
        fn: of pytrees of arrays. What `jax.set_mesh` has set is for it the same grid with Auto
            axes.

    Returns:
        A function to be traced; its results are on Auto axes.
    """

    @functools.wraps(fn)
    def computed(*args: Any) -> Any:
        with axes_of(auto(jax.sharding.get_abstract_mesh())):
            return on_auto(fn(*on_auto(args)))

    return computed


def on_auto(tree: Any) -> Any:
    """A pytree whose arrays are on Auto axes; other leaves stay what they are."""
    return jax.tree.map(lambda x: under_auto(x) if isinstance(x, jax.Array) else x, tree)


@contextlib.contextmanager
def axes_of(mesh: Any) -> Iterator[None]:
    """Where `jax.set_mesh` has set this grid, it has the types of this mesh for the time being.

    JAX compares the types of values with those of the mesh that is set. Where none is set, or
    another grid, nothing changes.

    Args:
        mesh: with devices, or abstract.
    """
    there = jax.sharding.get_abstract_mesh()
    if there.empty or not same_grid(there, mesh):
        yield
        return
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    with jax.sharding.use_abstract_mesh(abstract):
        yield


@contextlib.contextmanager
def hint(mesh: Mesh) -> Iterator[None]:
    """Say with JAX's complaints about layouts under which axes a step's loss is traced.

    Args:
        mesh: of the step.
    """
    try:
        yield
    except Exception as error:
        if is_typed(mesh) and re.search("mesh|shard|PartitionSpec", str(error)):
            error.add_note(
                "The mesh has Explicit axes, and the loss is traced under Auto ones. If it is "
                "written for Explicit axes, say so: train_step(.., explicit=True). Arrays on the "
                "mesh that it takes from elsewhere, give to the step: step(state, *batch)."
            )
        raise
