"""Logical axes: what the axes of a tensor mean, and which mesh axes split them.

A table is ordered pairs of a logical name and the mesh axis, axes (all of them) or None (whole)
that it goes to. A name that stands in several pairs has several choices. The pairs are tried in
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

What fits: the axis is on the mesh (of several, those that are there; of size 1 counts, and keeps
its name), and nothing else of the tensor uses it. Flax would then also take a choice that does not
divide the tensor's axis, and fail later; here the next one is tried, and if there is none it is an
error. An axis for which nothing is left is whole, and `notes` says why.

>>> table.fit((None, "batch"), (4, 6), make_mesh((8,), ("tp",)), "w", notes)
P()
>>> notes
["axis 1 ('batch') is whole: ('dp', 'fsdp') is not on the mesh"]
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
        given = self.pairs.items() if isinstance(self.pairs, Mapping) else self.pairs
        pairs = tuple(frozen(pair) for pair in map(tuple, given))
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

    def knows(self, names: Sequence[Any], mesh: Mesh) -> bool:
        """Whether every name is a logical axis or an axis of the mesh."""
        known = {*self.names, *mesh.axis_names}
        return all(name in known for entry in names for name in _names_in(entry))

    def fit(self, spec: Any, shape: tuple[int, ...], mesh: Mesh, name: str, notes: list[str]) -> P:
        """Put mesh axes for the logical names of a spec.

        Args:
            spec: any spelling; names in it that are in the table are logical ones, the others axes
                of the mesh.
            shape: global shape of the tensor.
            mesh: the mesh.
            name: of the tensor, for messages.
            notes: gets a line for each axis that is whole because no choice was left.

        Returns:
            The spec, canonical. Whether literal mesh axes divide the shape is not looked at.

        Raises:
            PlanError: a name is unknown, or a logical one stands twice.
            SpecError: the rest of the spec does not fit the mesh or the rank.
            UnevenError: the only choices that were free do not divide the tensor's axis.
        """
        entries = _entries(spec)
        if self.pairs and entries is not None:
            self._check_names(entries, mesh, name)
            if any(one in self.names for entry in entries for one in _names_in(entry)):
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

        Returns:
            The spec, canonical but for the open axes.

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
        names = [one for entry in entries for one in _names_in(entry)]
        unknown = [one for one in names if one not in self.names and one not in mesh.axis_names]
        if unknown:
            raise PlanError(
                f"{name}: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} "
                f"neither a logical axis of the plan ({', '.join(map(repr, sorted(self.names)))}) "
                f"nor a mesh axis ({', '.join(map(repr, mesh.axis_names))}); add it to axes, with "
                "None if it is not split"
            )
        twice = [one for one in self.names if names.count(one) > 1]
        if twice:
            raise PlanError(
                f"{name}: the logical axis {', '.join(map(repr, twice))} stands twice in "
                f"{tuple(entries)}; call one of the tensor's axes otherwise"
            )


class _Fitting:
    """One tensor on its way through the table."""

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
        self.homes = {one: axis for axis, entry in enumerate(entries) for one in _names_in(entry)}
        self.chosen: dict[str, tuple[str, ...]] = {}
        self.used = {one: axis for one, axis in self.homes.items() if one not in table.names}
        self.refused: dict[str, list[str]] = {}
        self.uneven: dict[str, str] = {}

    def run(self, notes: list[str]) -> P:
        """Try the pairs in order; give the spec in mesh axes."""
        for logical, target in self.table.pairs:
            if logical in self.homes and logical not in self.chosen:
                self._try(logical, target)
        left = [one for one in self.homes if one in self.table.names and one not in self.chosen]
        uneven = [self.uneven[one] for one in left if one in self.uneven]
        if uneven:
            raise UnevenError(
                f"{self.name}: shape {self.shape} does not split evenly: {'; '.join(uneven)}. Pad "
                "it, or give axes another choice after that one: (name, None) leaves it whole."
            )
        notes += [
            f"axis {self.homes[one]} ({one!r}) is whole: {', '.join(self.refused[one])}"
            for one in left
        ]
        return P(*(self._entry(entry) for entry in self.entries))

    def _try(self, logical: str, target: Any) -> None:
        wanted = axis_names(target)
        there = tuple(axis for axis in wanted if axis in self.mesh.axis_names)
        reasons = self.refused.setdefault(logical, [])
        if wanted and not there:
            reasons.append(f"{target!r} is not on the mesh")
            return
        taken = [axis for axis in there if axis in self.used]
        if taken:
            reasons.append(f"{taken[0]!r} splits axis {self.used[taken[0]]}")
            return
        axis = self.homes[logical]
        size = self.shape[axis] if axis < len(self.shape) else 0
        inside = [a for a, home in self.used.items() if home == axis]
        shards = math.prod(self.mesh.shape[a] for a in (*inside, *there))
        if size % shards:
            self.uneven[logical] = (
                f"axis {axis} ({logical!r}) has size {size}, which is no multiple of its {shards} "
                f"shards over {target!r}"
            )
            return
        self.chosen[logical] = there
        self.used.update(dict.fromkeys(there, axis))

    def _entry(self, entry: Any) -> Any:
        if entry is None:
            return None
        parts = entry if type(entry) is tuple else (entry,)
        return tuple(axis for one in parts for axis in self._axes(one))

    def _axes(self, one: Any) -> tuple[Any, ...]:
        return self.chosen.get(one, ()) if one in self.table.names else (one,)


def _entries(spec: Any) -> tuple[Any, ...] | None:
    """The entries of a spec that can hold names: a P or a tuple."""
    if isinstance(spec, P):
        return entries_of(spec)
    return spec if type(spec) is tuple else None


def _spelled_out(
    entries: tuple[Any, ...] | None, shape: tuple[int, ...], name: str
) -> tuple[Any, ...] | None:
    """The entries with an open axis for each that `...` stands for."""
    if entries is None or Ellipsis not in entries:
        return entries
    if entries.count(Ellipsis) > 1:
        raise PlanError(f"{name}: in {entries}, '...' stands more than once; one says it all")
    rest = len(shape) - len(entries) + 1
    if rest < 0:
        raise PlanError(
            f"{name}: {entries} speaks of {len(entries) - 1} axes, and the shape {shape} has "
            f"{len(shape)}"
        )
    at = entries.index(Ellipsis)
    return *entries[:at], *[P.UNCONSTRAINED] * rest, *entries[at + 1 :]


def _names_in(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return tuple(one for one in entry if isinstance(one, str)) if type(entry) is tuple else ()


def _is_pair(pair: Any) -> bool:
    if len(pair) != 2 or not isinstance(pair[0], str):
        return False
    target = pair[1]
    return target is None or isinstance(target, str) or _is_names(target)


def _is_names(target: Any) -> bool:
    return type(target) is tuple and all(isinstance(axis, str) for axis in target)
