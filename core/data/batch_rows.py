"""Rows of a batch: whether they split evenly, and padding where they do not.

Rows are counted along axis 0 of the arrays that the spec splits there. A process with local data
splits it over its own devices.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.transfer.leaf_specs import named_arrays
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> def batch(rows):
...     leaves, _ = named_arrays({"x": np.arange(rows), "mean": np.float32(0)}, None)
...     for leaf in leaves:
...         leaf.spec = P("data") if leaf.path == "x" else None
...     return leaves
>>> rows = BatchRows(mesh, local=False)
>>> rows.uneven(batch(4)), rows.uneven(batch(3))
([], [('x', 3, 2)])

Padding repeats the rows of the batch, from the first on, up to the size of the first batch, so that
one compiled step serves all batches:

>>> full, short = batch(4), batch(3)
>>> rows.pad(full), rows.pad(short)
(4, 3)
>>> [leaf.value.tolist() for leaf in short]
[0.0, [0, 1, 2, 0]]
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.runtime import metrics
from isoshard.core.transfer.leaf_specs import NamedArray, set_specs
from isoshard.core.transfer.process_local import local_block_indices

_OF_A_LOADER = "and for the last batch last='drop' or last='pad'"


class BatchRows:
    """Counts and pads the rows of the batches of one epoch.

    Args:
        mesh: of the batches.
        local: whether this process passes only its local data.
    """

    def __init__(self, mesh: Mesh, *, local: bool):
        """See the class."""
        self._mesh = mesh
        self._local = local
        self._first: int | None = None

    def uneven(self, leaves: list[NamedArray]) -> list[tuple[str, int, int]]:
        """The arrays whose rows do not split evenly: name, rows, shards."""
        return [
            (leaf.name, rows, shards) for leaf, rows, shards in self._split(leaves) if rows % shards
        ]

    def pad(self, leaves: list[NamedArray]) -> int:
        """Repeat rows until there are as many as in the first batch, and all split evenly.

        Args:
            leaves: of the batch, NumPy arrays; changed in place. Arrays that are not split along
                axis 0 are padded with the others if they have as many rows.

        Returns:
            The number of rows before padding.

        Raises:
            ShardingError: the arrays have different numbers of rows, none, or are no NumPy arrays.
        """
        rows, shards = self._common(leaves)
        target = -(-max(rows, self._first or 0) // shards) * shards
        self._first = self._first or target
        if target == rows:
            return rows
        if not rows:
            raise UnevenError(f"a batch of no rows cannot be padded to {target}; leave it out")
        index = np.arange(target) % rows
        for leaf in leaves:
            if np.ndim(leaf.value) and leaf.value.shape[0] == rows:
                if not isinstance(leaf.value, np.ndarray):
                    raise ShardingError(
                        f"{leaf.name}: a {type(leaf.value).__name__} on devices cannot be padded; "
                        "pass batches in host memory"
                    )
                leaf.value = leaf.value[index]
        metrics.count("data.padded_rows", target - rows)
        return rows

    def mask(self, leaves: list[NamedArray], rows: int, name: str) -> NamedArray:
        """The leaf that masks the rows that are no padding."""
        target, _ = self._common(leaves)
        leaf = self._split(leaves)[0][0]
        entry = named_sharding(leaf.spec, self._mesh, np.ndim(leaf.value)).spec[0]
        return NamedArray(name, name, np.arange(target) < rows, None, P(entry))

    def _common(self, leaves: list[NamedArray]) -> tuple[int, int]:
        """The common number of rows, and the least common multiple of the numbers of shards."""
        split = self._split(leaves)
        if len({rows for _, rows, _ in split}) != 1:
            listed = ", ".join(f"{leaf.name} has {rows}" for leaf, rows, _ in split)
            raise ShardingError(
                "padding needs arrays that are split along axis 0, all with the same number of "
                f"rows: {listed or 'no array of the batch is split there'}. Use last='error' or "
                "'drop', or give the arrays another spec."
            )
        return split[0][1], math.lcm(*(shards for _, _, shards in split))

    def _split(self, leaves: list[NamedArray]) -> list[tuple[NamedArray, int, int]]:
        """The leaves that are split along axis 0, with the numbers of rows and of shards."""
        split = []
        for leaf in leaves:
            rank = np.ndim(leaf.value)
            sharding = named_sharding(leaf.spec, self._mesh, rank, name=leaf.name)
            if not rank or not sharding.spec or sharding.spec[0] is None:
                continue
            counts, local_blocks = local_block_indices(sharding, rank)
            shards = len(local_blocks[0]) if self._local else counts[0]
            split.append((leaf, leaf.value.shape[0], shards))
        return split


def assign_specs(
    leaves: list[NamedArray], structure: Any, mesh: Mesh, spec: Any, name: str
) -> None:
    """Set the spec of each leaf of a batch, whether or not its rows divide.

    Args:
        leaves: of the batch.
        structure: of their tree.
        mesh: the mesh.
        spec: one for all, a tree of them, or a Plan, whose rules are for arrays with axes: scalars
            are replicated.
        name: of the batch, for messages.

    Raises:
        SpecError: the tree of specs does not match, or the plan does not fit.
    """
    if isinstance(spec, Plan):
        scalar_rules = {f"re:{re.escape(leaf.path)}": None for leaf in leaves if leaf.shape == ()}
        spec = Plan(scalar_rules).otherwise(spec) if scalar_rules else spec
        for leaf in leaves:  # a plan resolves shapes that divide; `BatchRows` counts the rows
            if leaf.shape is not None:
                leaf.global_shape = tuple(-(-n // mesh.size) * mesh.size for n in leaf.shape)
    set_specs(leaves, structure, mesh, spec, name)
    for leaf in leaves:
        leaf.global_shape = None


def uneven_error(
    uneven: list[tuple[str, int, int]], reason: str = "", *, fix: str = _OF_A_LOADER
) -> UnevenError:
    """The error of a batch whose rows do not split.

    Args:
        uneven: as `BatchRows.uneven` gives it.
        reason: added to the message.
        fix: an alternative to another batch size.
    """
    listed = "; ".join(
        f"{name} has {rows} rows for {shards} shards" for name, rows, shards in uneven
    )
    return UnevenError(
        f"a batch does not split evenly: {listed}. {reason}Choose a batch size that does, {fix}."
    )
