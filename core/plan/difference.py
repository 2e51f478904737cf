"""Differences between two resolved plans of one model: leaves, bytes per device, rules.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("fsdp", "tp"))
>>> shapes = {"up.weight": (64, 32), "norm.weight": (32,)}
>>> before = Plan({"up.*": ("tp",)}).resolve(shapes, mesh)
>>> diff = before.diff((Plan({"up.*": ("tp", "fsdp")}) * Plan({"norm.*": None})).resolve(shapes, mesh))
>>> [leaf.name for leaf in diff.changed], diff.bytes_per_device
(['up.weight'], (2176, 1152))
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isoshard.core.runtime.formatting import human_bytes, table

from .resolved_leaves import ResolvedLeaf

if TYPE_CHECKING:
    from .resolved import ResolvedPlan


@dataclasses.dataclass(frozen=True)
class LeafChange:
    """One leaf whose layout, shape or dtype differs.

    Attributes:
        name: of the leaf.
        before: the leaf under the first plan, or None if it is new.
        after: the leaf under the second plan, or None if it is gone.
    """

    name: str
    before: ResolvedLeaf | None
    after: ResolvedLeaf | None

    def __str__(self) -> str:
        """One line: what differs."""
        if self.before is None or self.after is None:
            return f"{self.name}: {'only after' if self.before is None else 'only before'}"
        return f"{self.name}: " + ", ".join(
            f"{field} {_arrow(a, b)}"
            for field, a, b in zip(
                ("shape", "dtype", "spec", "bytes", "rule"),
                _fields(self.before),
                _fields(self.after),
                strict=True,
            )
            if a != b
        )


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """Two layouts of one model; `print` it for a table, it is false if nothing differs.

    Attributes:
        before: the first.
        after: the second.
    """

    before: ResolvedPlan
    after: ResolvedPlan

    @property
    def changed(self) -> tuple[LeafChange, ...]:
        """The leaves whose shape, dtype, spec or bytes differ, or that only one has."""
        return tuple(change for change in self._all if _is_resharded(change))

    @property
    def renamed_rules(self) -> tuple[LeafChange, ...]:
        """The leaves with the same sharding as before, by another rule."""
        return tuple(
            change
            for change in self._all
            if change.before is not None
            and change.after is not None
            and not _is_resharded(change)
            and change.before.rule != change.after.rule
        )

    @property
    def bytes_per_device(self) -> tuple[int, int]:
        """Bytes per device, before and after."""
        return self.before.bytes_per_device, self.after.bytes_per_device

    def __bool__(self) -> bool:
        """Whether the layouts of any leaf, or the meshes, differ."""
        return bool(self.changed) or _axes(self.before) != _axes(self.after)

    @property
    def _all(self) -> list[LeafChange]:
        first = {leaf.name: leaf for leaf in self.before.leaves}
        second = {leaf.name: leaf for leaf in self.after.leaves}
        return [
            LeafChange(name, first.get(name), second.get(name))
            for name in dict.fromkeys([*first, *second])
        ]

    def __str__(self) -> str:
        """A table of the leaves that changed, and the bytes on each device."""
        changed = self.changed
        lines = table([_HEADER, *(_row(change) for change in changed)]) if changed else []
        sizes = _arrow(*map(human_bytes, self.bytes_per_device))
        lines.append(f"{len(changed)} of {len(self._all)} leaves changed, {sizes} on each device")
        if _axes(self.before) != _axes(self.after):
            lines.append(f"mesh {_axes(self.before)} -> {_axes(self.after)}")
        if self.renamed_rules:
            names = ", ".join(str(change) for change in self.renamed_rules)
            lines.append(f"same sharding by another rule: {names}")
        return "\n".join(lines)


_HEADER = ("name", "spec", "bytes/device", "rule")


def _is_resharded(change: LeafChange) -> bool:
    if change.before is None or change.after is None:
        return True
    return _fields(change.before)[:-1] != _fields(change.after)[:-1]


def _fields(leaf: ResolvedLeaf) -> tuple[str, ...]:
    size = human_bytes(leaf.bytes_per_device)
    return str(leaf.shape), leaf.dtype or "?", leaf.layout, size, leaf.rule


def _row(change: LeafChange) -> tuple[str, ...]:
    empty = ("", "", "(no such leaf)", "0 B", "-")
    before = _fields(change.before) if change.before else empty
    after = _fields(change.after) if change.after else empty
    return (
        change.name,
        *(_arrow(a, b) for a, b in zip(before[2:], after[2:], strict=True)),
    )


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _axes(resolved: ResolvedPlan) -> dict[str, int]:
    return dict(resolved.mesh.shape)
