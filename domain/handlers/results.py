"""What a handler returns: local arrays, and the sharding of each.

A handler returns a spec, or more: `ResultLayout` has the valid sizes of blocks as well, so the
result is an `UnevenArray`.

>>> ResultLayout(("x", None), sizes=((5, 2, 7, 4), None))
ResultLayout(spec=('x', None), sizes=((5, 2, 7, 4), None), blocks=())
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ShardingError,
    Sizes,
    SpecError,
    UnevenArray,
    WithLayout,
    entries_of,
    normalize_spec,
)
from isoshard.core.kit import spec_axis_names as axis_names


@dataclasses.dataclass(frozen=True)
class ResultLayout:
    """How a handler's local arrays form one result.

    Attributes:
        spec: which mesh axes split each axis of the result; any spelling.
        sizes: per axis None, or how many elements of each block are valid; the first ones.
        blocks: per axis None, or how many elements a local array has to have.
    """

    spec: Any
    sizes: Sequence[Sequence[int] | None] = ()
    blocks: tuple[int | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """One result, checked.

    Attributes:
        spec: canonical.
        shape: the true global shape.
        sizes: per axis None, or the valid sizes of the blocks.
        dtype: of the elements.
    """

    spec: P
    shape: tuple[int, ...]
    sizes: Sizes
    dtype: Any

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each axis."""
        names = tuple(map(axis_names, entries_of(self.spec)))
        return names + ((),) * (len(self.shape) - len(names))

    def global_array(self, array: Any, mesh: Mesh) -> Any:
        """The result over the padded array: an UnevenArray if it has sizes, else a `WithLayout`."""
        layout = NamedSharding(mesh, self.spec)
        if not any(size is not None for size in self.sizes):
            return WithLayout(array, layout)
        return UnevenArray(array, self.shape, self.sizes, layout)


def read_results(returned: Any, mesh: Mesh, name: str) -> tuple[list[Any], list[Result], Any]:
    """Validate and flatten what a handler returned.

    Raises:
        ShardingError: it is no such pair, or sizes do not fit; all errors in one message
            (SpecError: a spec names what the mesh does not have).
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ShardingError(
            f"the handler of {name} returned {_describe(returned)}; it returns a pair, (local, "
            "spec), or a tuple of local arrays and a tuple of as many specs"
        )
    leaves, structure = jax.tree.flatten(returned[0])
    try:
        specs = structure.flatten_up_to(returned[1])
    except (ValueError, TypeError):
        specs = None
    if specs is None:
        raise ShardingError(
            f"the handler of {name} returned local arrays of the structure {structure} and the "
            f"specs {returned[1]!r}; give one spec for each array, in the same structure"
        )
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    errors: list[str] = []
    kind: type[ShardingError] = SpecError
    results = []
    for index, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        layout = spec if isinstance(spec, ResultLayout) else ResultLayout(spec)
        try:
            canonical = normalize_spec(
                layout.spec, mesh, array.ndim, name=f"result {index} of the handler of {name}"
            )
        except SpecError as error:
            errors.append(str(error))
            continue
        wrong = _errors(layout, canonical, array, mesh)
        if wrong:
            kind = ShardingError
            errors.append(f"result {index} of the handler of {name}: {'; '.join(wrong)}")
            continue
        results.append(_result(layout, canonical, array, mesh))
    if errors:
        raise kind("; ".join(errors))
    return arrays, results, structure


def check_results(results: Sequence[Result], structure: Any, expected: Any, name: str) -> Any:
    """Compare results with what the function itself gives."""
    expected_leaves, tree = jax.tree.flatten(expected)
    flat = structure in (jax.tree.structure(kind(results)) for kind in (tuple, list))
    if tree != structure and not (flat and len(expected_leaves) == len(results)):
        raise ShardingError(
            f"the handler of {name} gives results of the structure {structure}, and {name} itself "
            f"of {tree}; return the same, or register with check=False"
        )
    errors = [
        f"result {index} is {_type(result)} in all, sharded as {result.spec}, and {name} itself "
        f"gives {_type(leaf)}"
        for index, (result, leaf) in enumerate(zip(results, expected_leaves, strict=True))
        if result.shape != tuple(leaf.shape) or result.dtype != leaf.dtype
    ]
    if errors:
        raise ShardingError(
            f"the handler of {name} returned a wrong local shape or dtype: {'; '.join(errors)}. "
            "Local shapes times the devices of each axis make the global shape (shards.like has an "
            "argument's layout); a handler that gives something else on purpose is registered with "
            "check=False."
        )
    return tree


def _errors(layout: ResultLayout, spec: P, array: Any, mesh: Mesh) -> list[str]:
    counts = _counts(spec, mesh, array.ndim)
    errors = []
    for field, values in (("sizes", layout.sizes), ("blocks", layout.blocks)):
        if len(values) not in (0, array.ndim):
            return [f"{field} {values} are for {len(values)} axes, and the array has {array.ndim}"]
    for axis, block in enumerate(layout.blocks):
        if block is not None and array.shape[axis] != block:
            errors.append(
                f"its local shape {tuple(array.shape)} is wrong: axis {axis} has "
                f"{array.shape[axis]} rows, and a block of the argument it is like has {block}"
            )
    for axis, size in enumerate(layout.sizes):
        if size is None:
            continue
        rows = array.shape[axis]
        if len(size) != counts[axis]:
            errors.append(f"axis {axis} has sizes {tuple(size)} for {counts[axis]} shards")
        elif any(not 0 <= count <= rows for count in size):
            errors.append(
                f"axis {axis} has sizes {tuple(size)}, and its local shape {tuple(array.shape)} "
                f"takes 0 to {rows}"
            )
    return errors


def _result(layout: ResultLayout, spec: P, array: Any, mesh: Mesh) -> Result:
    counts = _counts(spec, mesh, array.ndim)
    sizes = layout.sizes or (None,) * array.ndim
    shape = [
        rows * count if size is None else sum(size)
        for rows, count, size in zip(array.shape, counts, sizes, strict=True)
    ]
    fixed = tuple(None if size is None else tuple(map(int, size)) for size in sizes)
    return Result(spec, tuple(shape), fixed, array.dtype)


def _counts(spec: P, mesh: Mesh, ndim: int) -> list[int]:
    entries = (*entries_of(spec), *[None] * ndim)[:ndim]
    return [math.prod(mesh.shape[name] for name in axis_names(entry)) for entry in entries]


def _type(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _describe(returned: Any) -> str:
    return (
        f"a tuple of {len(returned)}"
        if isinstance(returned, tuple)
        else f"a {type(returned).__name__}"
    )
