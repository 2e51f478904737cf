"""Resolved plans: the sharding of every leaf by name, and a table of it.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> resolved = Plan({"*.kernel": (None, "model")}).resolve({"a.kernel": (4, 8)}, mesh)
>>> resolved.specs
{'a.kernel': P(None, 'model')}
>>> resolved.leaves[0].bytes_per_device
32

Leaves are named by their path: dictionary keys, list positions and attribute names joined by dots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.runtime.formatting import human_bytes, table
from isoshard.core.runtime.shown_text import preformatted

from . import goldens
from .difference import PlanDiff
from .resolved_leaves import ResolvedActivation, ResolvedLeaf

BY_DEFAULT, BY_SIZE, BY_NAMES = "(default)", "(small)", "(its own axis names)"


@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A plan applied to named leaves on a mesh; `print` it for a table.

    Attributes:
        leaves: one entry per leaf, in the order given.
        mesh: the mesh it was resolved for.
        unused: patterns that decided for no leaf.
        activations: the inputs and outputs of modules with a rule, if a module was resolved.
    """

    leaves: tuple[ResolvedLeaf, ...]
    mesh: Mesh | AbstractMesh
    unused: tuple[str, ...]
    activations: tuple[ResolvedActivation, ...] = ()

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each leaf, by name."""
        return {leaf.name: leaf.sharding for leaf in self.leaves}

    @property
    def specs(self) -> dict[str, P]:
        """The spec of each leaf, by name."""
        return {leaf.name: leaf.sharding.spec for leaf in self.leaves}

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Names of the leaves that no rule matched."""
        return tuple(leaf.name for leaf in self.leaves if leaf.rule in (BY_DEFAULT, BY_SIZE))

    @property
    def bytes_per_device(self) -> int:
        """Bytes per device; leaves of unknown dtype count 4 bytes an element."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def shardings_like(self, tree: Any) -> Any:
        """The shardings in the structure of `tree`, e.g. for `jax.jit(.., out_shardings=..)`.

        Args:
            tree: a pytree with the leaves that were resolved.

        Returns:
            The same tree with a NamedSharding in place of each leaf.
        """
        shardings = self.shardings
        return jax.tree.map_with_path(lambda path, _: shardings[path_name(path)], tree)

    def diff(self, other: ResolvedPlan) -> PlanDiff:
        """Compare with another resolved plan of the same model.

        Args:
            other: the resolved plan after the change; this one is before.

        Returns:
            The leaves that differ, and the bytes of both; `str` of it is a table.
        """
        return PlanDiff(self, other)

    def to_json(self) -> str:
        """The resolved plan as JSON, one leaf a line, for a golden file.

        Returns:
            The text; `from_json` reads it, `check_golden` compares with it.
        """
        return goldens.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> ResolvedPlan:
        """Read what `to_json` wrote.

        Args:
            text: the JSON.

        Returns:
            The resolved plan, over an `AbstractMesh`: it needs no devices.

        Raises:
            PlanError: the text is not such JSON.
        """
        return cls(*goldens.fields_of(text))

    def check_golden(self, golden: Any) -> None:
        """Compare with a golden file, and name every difference.

        Args:
            golden: a path, or the JSON itself as text that starts with "{".

        Raises:
            PlanError: something differs, or there is no such file; the message has the call that
                writes it.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> mesh = make_mesh((8,), ("x",))
            >>> golden = Plan({"w": P("x")}).resolve({"w": (8, 4)}, mesh).to_json()
            >>> Plan({"w": P("x")}).resolve({"w": (8, 4)}, mesh).check_golden(golden)
        """
        text, where = goldens.text_of(golden)
        goldens.check(self.from_json(text), self, where)

    def __str__(self) -> str:
        """A table of the leaves, the bytes on each device, and the unmatched leaves."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        lines = table([_HEADER, *(_row(leaf) for leaf in self.leaves)], right=4)
        lines.append(
            f"total {human_bytes(self.bytes_per_device)} on each of {self.mesh.size} devices, "
            f"mesh ({axes})"
        )
        if self.activations:
            rows = [(a.module or "(model)", a.side, a.spec, a.rule) for a in self.activations]
            lines += table([("module", "value", "spec", "rule"), *rows])
        lines += [f"{leaf.name}: {note}" for leaf in self.leaves for note in leaf.notes]
        if self.unmatched:
            lines.append(f"matched by no rule, so by default: {', '.join(self.unmatched)}")
        if self.unused:
            lines.append(f"rules that decided nothing: {', '.join(map(repr, self.unused))}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


_HEADER = ("name", "shape", "dtype", "spec", "bytes/device", "rule")


def _row(leaf: ResolvedLeaf) -> tuple[str, ...]:
    size = human_bytes(leaf.bytes_per_device)
    return leaf.name, str(leaf.shape), leaf.dtype or "?", leaf.layout, size, leaf.rule
