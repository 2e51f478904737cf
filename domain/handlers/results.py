"""What a handler returns: local arrays, and the layout of each.

A handler says a spec, or more: `ResultLayout` tells the valid sizes of blocks as well, so the
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

from isoshard.core.blocks.known_shardings import WithLayout
from isoshard.core.errors import ShardingError, SpecError
from isoshard.core.layout.spec import axis_names, normalize_spec
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import Sizes, UnevenArray


@dataclasses.dataclass(frozen=True)
class ResultLayout:
    """How a handler's local arrays make one result.

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
        found = tuple(map(axis_names, entries_of(self.spec)))
        return found + ((),) * (len(self.shape) - len(found))

    def global_array(self, array: Any, mesh: Mesh) -> Any:
        """The result over the padded array: an UnevenArray if it has sizes, else a `WithLayout`."""
        layout = NamedSharding(mesh, self.spec)
        if not any(size is not None for size in self.sizes):
            return WithLayout(array, layout)
        return UnevenArray(array, self.shape, self.sizes, layout)


def read_results(made: Any, mesh: Mesh, name: str) -> tuple[list[Any], list[Result], Any]:
    """Take apart what a handler returned.

    Raises:
        ShardingError: it is no such pair, or sizes do not fit; all faults in one message
            (SpecError: a spec names what the mesh does not have).
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise ShardingError(
            f"the handler of {name} returned {_told(made)}; it returns a pair, (local, spec), or "
            "a tuple of local arrays and a tuple of as many specs"
        )
    leaves, structure = jax.tree.flatten(made[0])
    try:
        specs = structure.flatten_up_to(made[1])
    except (ValueError, TypeError):
        specs = None
    if specs is None:
        raise ShardingError(
            f"the handler of {name} returned local arrays of the structure {structure} and the "
            f"specs {made[1]!r}; give one spec for each array, in the same structure"
        )
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    faults: list[str] = []
    kind: type[ShardingError] = SpecError
    results = []
    for number, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        laid = spec if isinstance(spec, ResultLayout) else ResultLayout(spec)
        try:
            canonical = normalize_spec(
                laid.spec, mesh, array.ndim, name=f"result {number} of the handler of {name}"
            )
        except SpecError as error:
            faults.append(str(error))
            continue
        wrong = _faults(laid, canonical, array, mesh)
        if wrong:
            kind = ShardingError
            faults.append(f"result {number} of the handler of {name}: {'; '.join(wrong)}")
            continue
        results.append(_result(laid, canonical, array, mesh))
    if faults:
        raise kind("; ".join(faults))
    return arrays, results, structure


def check_results(found: Sequence[Result], structure: Any, expected: Any, name: str) -> Any:
    """Compare results with what the function itself gives."""
    wanted, tree = jax.tree.flatten(expected)
    flat = structure in (jax.tree.structure(kind(found)) for kind in (tuple, list))
    if tree != structure and not (flat and len(wanted) == len(found)):
        raise ShardingError(
            f"the handler of {name} gives results of the structure {structure}, and {name} itself "
            f"of {tree}; return the same, or register with check=False"
        )
    faults = [
        f"result {number} is {_type(own)} in all, laid out as {own.spec}, and {name} itself gives "
        f"{_type(other)}"
        for number, (own, other) in enumerate(zip(found, wanted, strict=True))
        if own.shape != tuple(other.shape) or own.dtype != other.dtype
    ]
    if faults:
        raise ShardingError(
            f"the handler of {name} returned a wrong local shape or dtype: {'; '.join(faults)}. "
            "Local shapes times the devices of each axis make the whole (shards.like says how an "
            "argument's blocks lie); a handler that gives something else on purpose is registered "
            "with check=False."
        )
    return tree


def _faults(laid: ResultLayout, spec: P, array: Any, mesh: Mesh) -> list[str]:
    counts = _counts(spec, mesh, array.ndim)
    faults = []
    for what, given in (("sizes", laid.sizes), ("blocks", laid.blocks)):
        if len(given) not in (0, array.ndim):
            return [f"{what} {given} are for {len(given)} axes, and the array has {array.ndim}"]
    for axis, block in enumerate(laid.blocks):
        if block is not None and array.shape[axis] != block:
            faults.append(
                f"its local shape {tuple(array.shape)} is wrong: axis {axis} has "
                f"{array.shape[axis]} rows, and a block of the argument it lies like has {block}"
            )
    for axis, size in enumerate(laid.sizes):
        if size is None:
            continue
        rows = array.shape[axis]
        if len(size) != counts[axis]:
            faults.append(f"axis {axis} has sizes {tuple(size)} for {counts[axis]} shards")
        elif any(not 0 <= number <= rows for number in size):
            faults.append(
                f"axis {axis} has sizes {tuple(size)}, and its local shape {tuple(array.shape)} "
                f"holds 0 to {rows}"
            )
    return faults


def _result(laid: ResultLayout, spec: P, array: Any, mesh: Mesh) -> Result:
    counts = _counts(spec, mesh, array.ndim)
    sizes = laid.sizes or (None,) * array.ndim
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


def _told(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
