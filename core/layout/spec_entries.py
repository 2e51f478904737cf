"""The entries of a spec, checked against a mesh.

An entry is a mesh axis, several, or None. Each is checked, all errors go into one message, and
redundancy is dropped: trailing None, and the tuple around a single name.

>>> from isoshard.core.layout.mesh import make_mesh
>>> canonical_spec(("x", (1,), None), make_mesh((2, 4), ("x", "y")), 3, "weight")
P('x', 'y')
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import SpecError

from .mesh import describe_mesh


def canonical_spec(spec: Any, mesh: Mesh, ndim: int, name: str) -> P:
    """Check every entry, with all errors in one message, and drop redundancy.

    Args:
        spec: a PartitionSpec, a tuple or list of entries, or None.
        mesh: whose axes it names.
        ndim: rank of the tensor.
        name: of the tensor, for messages.

    Returns:
        The spec, without trailing None and without 1-tuples.

    Raises:
        SpecError: an entry is no mesh axis, an axis is used twice, or there are more entries than
            tensor axes.
    """
    errors: list[str] = []
    entries = [_entry(item, mesh, errors) for item in _items(spec, errors)]
    used = [axis for axes in entries for axis in axes]
    errors += [
        f"mesh axis {axis!r} is used {used.count(axis)} times"
        for axis in dict.fromkeys(used)
        if used.count(axis) > 1
    ]
    if len(entries) > ndim:
        errors.append(f"it has {len(entries)} entries for a tensor of rank {ndim}")
    if errors:
        raise SpecError(
            f"{name}: spec {spec!r} does not fit: {'; '.join(errors)}. The mesh axes are "
            f"{describe_mesh(mesh)}: name them, or give their indices "
            f"0..{len(mesh.axis_names) - 1}."
        )
    while entries and not entries[-1]:
        entries.pop()
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


def _items(spec: Any, errors: list[str]) -> tuple[Any, ...]:
    if spec is None:
        return ()
    if isinstance(spec, P):
        errors += [
            f"{kind} axes ({', '.join(map(repr, sorted(axes)))}) are supported only by iso.shard "
            "and iso.reshard of JAX arrays"
            for kind in ("unreduced", "reduced")
            if (axes := getattr(spec, kind, ()))
        ]
        return entries_of(spec)
    if isinstance(spec, range):  # torch_xla's guide writes range(tensor.dim())
        return tuple(spec)
    if is_group(spec):
        return tuple(spec)
    errors.append(
        f"a {type(spec).__name__} is no spec; give a P(..), a tuple with one entry per tensor "
        "axis, None, a NamedSharding or an OpSharding string"
    )
    return ()


def _entry(item: Any, mesh: Mesh, errors: list[str]) -> tuple[str, ...]:
    if item is None:
        return ()
    if item is P.UNCONSTRAINED:
        errors.append("UNCONSTRAINED leaves the axis open, and data needs a sharding")
        return ()
    if is_group(item):
        return tuple(name for axis in item for name in _axis(axis, mesh, errors))
    return _axis(item, mesh, errors)


def _axis(axis: Any, mesh: Mesh, errors: list[str]) -> tuple[str, ...]:
    if isinstance(axis, str) and axis in mesh.axis_names:
        return (axis,)
    if isinstance(axis, str):
        errors.append(f"no mesh axis is called {axis!r}")
    elif not is_axis(axis):
        errors.append(f"{axis!r} is no axis name, index, None or tuple of those")
    elif 0 <= axis < len(mesh.axis_names):
        return (mesh.axis_names[int(axis)],)
    else:
        errors.append(f"there is no mesh axis {axis} (indices count from 0)")
    return ()


def is_axis(axis: Any) -> bool:
    """Whether this is written as one mesh axis: a name or an index."""
    return isinstance(axis, str | int | np.integer) and not isinstance(axis, bool)


def is_group(item: Any) -> bool:
    """Whether this is written as several: a tuple or list."""
    return isinstance(item, tuple | list) and not isinstance(item, P)


def entries_of(spec: P) -> tuple[Any, ...]:
    """The entries of a PartitionSpec; before JAX 0.10 it was a tuple."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a canonical spec, outermost first; of P.UNCONSTRAINED, none.

    Example:
        >>> axis_names(None), axis_names("x"), axis_names(("x", "y"))
        ((), ('x',), ('x', 'y'))
    """
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
