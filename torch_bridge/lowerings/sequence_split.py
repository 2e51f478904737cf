"""Whether the program being compiled may split the sequence of an attention over devices.

Before it traces, the engine declares shapes and shardings of the program's inputs, and the
layouts that are marked in it. A sequence of tokens is often made of something else, patches of an
image or a sum of embeddings, so this is a guess on the safe side. Where it is True, an attention
reads the shardings that the compiler chose, and is a ring attention only then. Where it is
False (split by batch, or weights by rows and columns) programs are unchanged.

>>> from isoshard import P, make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> tokens, weight = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, "y"))
>>> with splitting([((4, 16), tokens), ((32, 32), weight)], []):
...     may_split((4, 8, 16, 4), 16)          # (batch, heads, queries, width), and keys
True
>>> with splitting([((32, 32), weight)], []):
...     may_split((4, 8, 16, 4), 16)
False
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator

import jax
from jax.sharding import NamedSharding, Sharding

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names

_Split = tuple[tuple[int, ...] | None, tuple[int, ...]]  # a shape if known, and the axes split

_SPLITS: contextvars.ContextVar[tuple[_Split, ...]] = contextvars.ContextVar("splits", default=())
_SEVERAL: contextvars.ContextVar[bool] = contextvars.ContextVar("several", default=False)


@contextlib.contextmanager
def splitting(
    inputs: Iterable[tuple[tuple[int, ...], Sharding]], marks: Iterable[Sharding]
) -> Iterator[None]:
    """Declare the shardings of the program that is compiled.

    Args:
        inputs: shape and layout of each.
        marks: the layouts that are marked inside.
    """
    every: list[tuple[tuple[int, ...] | None, Sharding]] = [*inputs]
    every += [(None, sharding) for sharding in marks]
    named = [(shape, s) for shape, s in every if isinstance(s, NamedSharding)]
    meshes = {mesh_of(s) for _, s in named}
    shardings = [(shape, _axes(s)) for shape, s in named]
    # JAX compiles an operator that queries its sharding only where all layouts are on one mesh.
    splits = tuple(split for split in shardings if split[1]) if len(meshes) == 1 else ()
    several = len(meshes) == 1 and next(iter(meshes)).size > 1
    tokens = _SPLITS.set(tuple(dict.fromkeys(splits))), _SEVERAL.set(several)
    try:
        yield
    finally:
        _SPLITS.reset(tokens[0])
        _SEVERAL.reset(tokens[1])


def may_split(queries: tuple[int, ...], keys: int) -> bool:
    """Whether the program may split the sequence of queries or of keys.

    Args:
        queries: their shape, (.., heads, length, width).
        keys: how many there are.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:  # inside `jax.shard_map`: these are shards
        return False
    return any(_may(*split, queries, keys) for split in _SPLITS.get())


def is_partitioned() -> bool:
    """Whether the program is for several devices, and what is lowered is not one device's already.

    So it is where no input is split: a planner traces a step before it has shardings.
    """
    return _SEVERAL.get() and not jax.sharding.get_abstract_mesh().manual_axes


def _may(
    shape: tuple[int, ...] | None, axes: tuple[int, ...], queries: tuple[int, ...], keys: int
) -> bool:
    alone = math.prod(queries[:-3]) == 1  # without a batch, the first axis may be the sequence
    if shape is None:
        return alone or axes[-1] > 0
    lengths = {queries[-2], keys}
    for axis in axes:
        if shape[axis] in lengths and (axis > 0 or alone or len(shape) == 3):
            return True  # of three axes the first may be the sequence, with the batch behind it
        if len(shape) == 3 and axis > 0:
            return True
        if len(shape) > 3 and axis > 1 and (axis, shape[axis]) != (len(shape) - 1, queries[-1]):
            return True
    return False


def _axes(sharding: NamedSharding) -> tuple[int, ...]:
    """The axes that are split."""
    sizes = sharding.mesh.shape
    return tuple(
        axis
        for axis, entry in enumerate(sharding.spec)
        if any(sizes[name] > 1 for name in axis_names(entry))
    )
