"""Resolved plans: the layout of every leaf by name, and a table of it to read.

>>> from isoshard.core.mesh import make_mesh
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .metrics import human_bytes

BY_DEFAULT, BY_SIZE = "(default)", "(small)"


@dataclasses.dataclass(frozen=True)
class ResolvedLeaf:
    """What a plan says about one leaf.

    Attributes:
        name: its path, joined by dots.
        shape: global shape.
        dtype: name of its dtype, or None if only the shape is known.
        sharding: its layout, canonical.
        bytes_per_device: bytes of one shard; 4 an element if the dtype is unknown.
        rule: the pattern that decided, "(default)", or "(small)".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    sharding: NamedSharding
    bytes_per_device: int
    rule: str


@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A plan applied to named leaves on a mesh; `print` it for a table.

    Attributes:
        leaves: one entry per leaf, in the order given.
        mesh: the mesh it was resolved for.
        unused: patterns that decided for no leaf.
    """

    leaves: tuple[ResolvedLeaf, ...]
    mesh: Mesh
    unused: tuple[str, ...]

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """The layout of each leaf, by name."""
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
        """Bytes that one device holds; leaves of unknown dtype count 4 bytes an element."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def shardings_like(self, tree: Any) -> Any:
        """Arrange the layouts as `tree` is, e.g. for `jax.jit(.., out_shardings=..)`.

        Args:
            tree: a pytree with the leaves that were resolved.

        Returns:
            The same tree with a NamedSharding in place of each leaf.
        """
        found = self.shardings
        return jax.tree.map_with_path(lambda path, _: found[path_name(path)], tree)

    def __str__(self) -> str:
        """A table of the leaves, the bytes on each device, and what was left unmatched."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        lines = _table([_HEADER, *(_row(leaf) for leaf in self.leaves)])
        lines.append(
            f"total {human_bytes(self.bytes_per_device)} on each of {self.mesh.size} devices, "
            f"mesh ({axes})"
        )
        if self.unmatched:
            lines.append(f"matched by no rule, so by default: {', '.join(self.unmatched)}")
        if self.unused:
            lines.append(f"rules that decided nothing: {', '.join(map(repr, self.unused))}")
        return "\n".join(lines)


def path_name(path: tuple[Any, ...]) -> str:
    """Join a JAX key path with dots.

    Args:
        path: keys as `jax.tree.leaves_with_path` gives them.

    Returns:
        The name. A box around one array (a Flax `Variable` or `Partitioned`, whose leaf is its
        attribute `value`) goes by the name of the box.

    Example:
        >>> path_name((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0)))
        'blocks.0'
    """
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """List the leaves of a pytree with their names, paths joined by dots.

    Args:
        tree: any pytree.

    Returns:
        Pairs of name and leaf, in JAX's order.

    Example:
        >>> named_leaves({"a": [1.0, 2.0]})
        [('a.0', 1.0), ('a.1', 2.0)]
    """
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


_HEADER = ("name", "shape", "dtype", "spec", "bytes/device", "rule")


def _row(leaf: ResolvedLeaf) -> tuple[str, ...]:
    size = human_bytes(leaf.bytes_per_device)
    spec = repr(leaf.sharding.spec).replace("PartitionSpec", "P")
    return leaf.name, str(leaf.shape), leaf.dtype or "?", spec, size, leaf.rule


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column == 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
