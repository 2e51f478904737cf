"""Logical axes: what the axes of a tensor mean, and which mesh axes split them.

A table is ordered pairs of a logical name and the mesh axis, axes (all of them) or None (unsplit)
that it maps to. A name in several pairs has several choices. The pairs are tried in
order, and the first that fits decides, as in Flax, T5X and MaxText:

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("fsdp", "tp"))
>>> table = AxisTable([("batch", ("dp", "fsdp")), ("mlp", "tp"), ("embed", "tp"), ("embed", "fsdp")])
>>> notes = []
>>> table.fit(("embed", "mlp"), (32, 128), mesh, "w", notes)
P('fsdp', 'tp')
>>> table.fit(("embed", "heads"), (32, 8), mesh, "w", notes)
Traceback (most recent call last):
    ...
isoshard.core.plan.layout_rules.PlanError: w: 'heads' is neither a logical axis of the plan ('batch', 'embed', 'mlp') nor a mesh axis ('fsdp', 'tp'); add it to axes, with None if it is not split

A pair fits if the mesh has its axis (of several, those that it has; an axis of size 1 counts, and
keeps its name) and no other axis of the tensor uses it. Flax would then also take a choice that
does not divide the tensor's axis, and fail later; here the next pair is tried, and it is an error
if there is none. An axis without a choice is not split, and `notes` gets the reason.

>>> table.fit((None, "batch"), (4, 6), make_mesh((8,), ("tp",)), "w", notes)
P()
>>> notes
["axis 1 ('batch') is not split: ('dp', 'fsdp') is not on the mesh"]
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import axis_names, normalize_spec
from isoshard.core.layout.spec_entries import entries_of

from ..errors import UnevenError
from .freezing import frozen
from .layout_rules import PlanError


@dataclasses.dataclass(frozen=True)
class AxisTable:
    """Ordered pairs of logical name and mesh axes; hashable.

    Args:
        pairs: a mapping, or pairs; repeated names are choices in order.

    Raises:
        PlanError: listing each pair that is malformed.

    Example:
        >>> AxisTable({"embed": "fsdp", "norm": None}).names
        ('embed', 'norm')
    """

    pairs: Any = ()

    def __post_init__(self) -> None:
        """Freeze the pairs, and check them."""
        items = self.pairs.items() if isinstance(self.pairs, Mapping) else self.pairs
        pairs = tuple(frozen(pair) for pair in map(tuple, items))
        wrong = [repr(pair) for pair in pairs if not _is_pair(pair)]
        if wrong:
            raise PlanError(
                f"axes are pairs of a logical name and a mesh axis, a tuple of them or None, not "
                f"{', '.join(wrong)}"
            )
        object.__setattr__(self, "pairs", pairs)

    def __bool__(self) -> bool:
        """Whether there is any pair."""
        return bool(self.pairs)

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.pairs))

    def contains(self, names: Sequence[Any], mesh: Mesh) -> bool:
        """Whether every name is a logical axis or an axis of the mesh."""
        allowed = {*self.names, *mesh.axis_names}
        return all(name in allowed for entry in names for name in _names_in(entry))

    def fit(self, spec: Any, shape: tuple[int, ...], mesh: Mesh, name: str, notes: list[str]) -> P:
        """Translate the logical names of a spec to mesh axes.

        Args:
            spec: any spelling; names in it that are in the table are logical ones, the others axes
                of the mesh.
            shape: global shape of the tensor.
            mesh: the mesh.
            name: of the tensor, for messages.
            notes: gets a line for each axis that is not split because no choice was left.

        Returns:
            The spec, canonical. Whether literal mesh axes divide the shape is not checked.

        Raises:
            PlanError: a name is unknown, or a logical name is repeated.
            SpecError: the rest of the spec does not fit the mesh or the rank.
            UnevenError: the only choices that were free do not divide the tensor's axis.
        """
        entries = _entries(spec)
        if self.pairs and entries is not None:
            self._check_names(entries, mesh, name)
            if any(axis in self.names for entry in entries for axis in _names_in(entry)):
                spec = _Fitting(self, entries, shape, mesh, name).run(notes)
        return normalize_spec(P() if spec is None else spec, mesh, len(shape), name=name)

    def fit_open(self, spec: Any, shape: tuple[int, ...], mesh: Mesh, name: str) -> P:
        """Like `fit`, for values of a computation: entries may be `P.UNCONSTRAINED`.

        Args:
            spec: any spelling; `P.UNCONSTRAINED` in a tuple or P leaves an axis to the compiler,
                `...` all those that the others do not name.
            shape: global shape of the value.
            mesh: the mesh.
            name: of the value, for messages.

        Raises:
            ShardingError: as `fit`.
        """
        entries = _spelled_out(_entries(spec), shape, name)
        is_open = [entry is P.UNCONSTRAINED for entry in entries or ()]
        if entries is None or not any(is_open):
            return self.fit(spec if entries is None else entries, shape, mesh, name, [])
        closed = tuple(None if o else e for e, o in zip(entries, is_open, strict=True))
        fitted = self.fit(closed, shape, mesh, name, [])
        padded = [*fitted, *[None] * (len(entries) - len(fitted))]
        full = [P.UNCONSTRAINED if o else e for e, o in zip(padded, is_open, strict=True)]
        while full and full[-1] is None:
            full.pop()
        return P(*full)

    def _check_names(self, entries: Sequence[Any], mesh: Mesh, name: str) -> None:
        names = [axis for entry in entries for axis in _names_in(entry)]
        unknown = [axis for axis in names if axis not in self.names and axis not in mesh.axis_names]
        if unknown:
            raise PlanError(
                f"{name}: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} "
                f"neither a logical axis of the plan ({', '.join(map(repr, sorted(self.names)))}) "
                f"nor a mesh axis ({', '.join(map(repr, mesh.axis_names))}); add it to axes, with "
                "None if it is not split"
            )
        repeated = [axis for axis in self.names if names.count(axis) > 1]
        if repeated:
            raise PlanError(
                f"{name}: the logical axis {', '.join(map(repr, repeated))} is repeated in "
                f"{tuple(entries)}; rename one of the tensor's axes"
            )


class _Fitting:
    """The assignment of mesh axes to the logical axes of one tensor."""

    def __init__(
        self,
        table: AxisTable,
        entries: Sequence[Any],
        shape: tuple[int, ...],
        mesh: Mesh,
        name: str,
    ):
        self.table, self.entries = table, entries
        self.shape, self.mesh, self.name = shape, mesh, name
        self.homes = {
            logical: axis for axis, entry in enumerate(entries) for logical in _names_in(entry)
        }
        self.chosen: dict[str, tuple[str, ...]] = {}
        self.used = {
            logical: axis for logical, axis in self.homes.items() if logical not in table.names
        }
        self.rejected: dict[str, list[str]] = {}
        self.uneven: dict[str, str] = {}

    def run(self, notes: list[str]) -> P:
        """The spec in mesh axes; the pairs are tried in order."""
        for logical, target in self.table.pairs:
            if logical in self.homes and logical not in self.chosen:
                self._try(logical, target)
        unassigned = [
            logical
            for logical in self.homes
            if logical in self.table.names and logical not in self.chosen
        ]
        uneven = [self.uneven[logical] for logical in unassigned if logical in self.uneven]
        if uneven:
            raise UnevenError(
                f"{self.name}: shape {self.shape} does not split evenly: {'; '.join(uneven)}. Pad "
                "it, or give axes another choice after that one: (name, None) does not split it."
            )
        notes += [
            f"axis {self.homes[logical]} ({logical!r}) is not split: "
            f"{', '.join(self.rejected[logical])}"
            for logical in unassigned
        ]
        return P(*(self._entry(entry) for entry in self.entries))

    def _try(self, logical: str, target: Any) -> None:
        target_axes = axis_names(target)
        present = tuple(axis for axis in target_axes if axis in self.mesh.axis_names)
        reasons = self.rejected.setdefault(logical, [])
        if target_axes and not present:
            reasons.append(f"{target!r} is not on the mesh")
            return
        taken = [axis for axis in present if axis in self.used]
        if taken:
            reasons.append(f"{taken[0]!r} splits axis {self.used[taken[0]]}")
            return
        axis = self.homes[logical]
        size = self.shape[axis] if axis < len(self.shape) else 0
        inside = [a for a, home in self.used.items() if home == axis]
        shards = math.prod(self.mesh.shape[a] for a in (*inside, *present))
        if size % shards:
            self.uneven[logical] = (
                f"axis {axis} ({logical!r}) has size {size}, which is no multiple of its {shards} "
                f"shards over {target!r}"
            )
            return
        self.chosen[logical] = present
        self.used.update(dict.fromkeys(present, axis))

    def _entry(self, entry: Any) -> Any:
        if entry is None:
            return None
        names = entry if type(entry) is tuple else (entry,)
        return tuple(axis for name in names for axis in self._axes(name))

    def _axes(self, name: Any) -> tuple[Any, ...]:
        return self.chosen.get(name, ()) if name in self.table.names else (name,)


def _entries(spec: Any) -> tuple[Any, ...] | None:
    """The entries of a spec that can contain names: of a P or a tuple."""
    if isinstance(spec, P):
        return entries_of(spec)
    return spec if type(spec) is tuple else None


def _spelled_out(
    entries: tuple[Any, ...] | None, shape: tuple[int, ...], name: str
) -> tuple[Any, ...] | None:
    """The entries with `...` replaced by one unconstrained axis per axis that it covers."""
    if entries is None or Ellipsis not in entries:
        return entries
    if entries.count(Ellipsis) > 1:
        raise PlanError(f"{name}: in {entries}, '...' is repeated; use it once")
    rest = len(shape) - len(entries) + 1
    if rest < 0:
        raise PlanError(
            f"{name}: {entries} names {len(entries) - 1} axes, and the shape {shape} has "
            f"{len(shape)}"
        )
    at = entries.index(Ellipsis)
    return *entries[:at], *[P.UNCONSTRAINED] * rest, *entries[at + 1 :]


def _names_in(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return tuple(name for name in entry if isinstance(name, str)) if type(entry) is tuple else ()


def _is_pair(pair: Any) -> bool:
    if len(pair) != 2 or not isinstance(pair[0], str):
        return False
    target = pair[1]
    return target is None or isinstance(target, str) or _is_names(target)


def _is_names(target: Any) -> bool:
    return type(target) is tuple and all(isinstance(axis, str) for axis in target)
