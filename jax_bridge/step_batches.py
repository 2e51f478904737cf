"""Batches of a training step, sharded by the `inputs` of its plan.

>>> import numpy as np
>>> mesh = jax.make_mesh((2, 4), ("data", "model"))
>>> batches = StepBatches(mesh, Plan.data_parallel("data"), "error")
>>> placed, = batches.place((np.ones((8, 4), np.float32),))
>>> placed.sharding.spec
P('data',)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.data.batch_rows import BatchRows, assign_specs, uneven_error
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.plan import Plan
from isoshard.core.plan.freezing import UNSET
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.core.transfer.leaf_specs import NamedArray, named_arrays


class StepBatches:
    """Shards the batches of a training step.

    Args:
        mesh: of the step.
        plan: of the step. Without `inputs` in it, batches remain as they are.
        uneven: "error" or "pad".

    Raises:
        ShardingError: `uneven` is neither, or is "pad" and the plan splits no batch.
    """

    def __init__(self, mesh: Mesh, plan: Plan, uneven: str):
        """See the class."""
        has_inputs = any(factor.inputs is not UNSET for factor in plan.factors)
        if uneven not in ("error", "pad"):
            raise ShardingError(f"uneven is 'error' or 'pad', not {uneven!r}")
        if uneven == "pad" and not has_inputs:
            raise ShardingError(
                'uneven="pad" is for batches that the plan shards, and the plan has no inputs; '
                "add them: Plan(.., inputs=P(..))"
            )
        self._mesh = mesh
        self._plan = plan.for_inputs() if has_inputs else None
        self._pads = uneven == "pad"
        self._rows = BatchRows(mesh, local=False)
        self._specs: Bounded[Any, list[Any]] = Bounded(PROGRAMS, "jax training steps: specs")

    def place(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shard the arrays of a batch.

        Args:
            batch: the arguments of the loss after the model, pytrees. The arrays of a single one
                are named as in a loader; with several, names begin with the argument's position.

        Returns:
            The same trees. NumPy arrays are copied, arrays on devices are moved where their
            sharding differs; scalars remain as they are.

        Raises:
            UnevenError: rows do not divide.
            ShardingError: an array does not fit the plan's `inputs`, or cannot be padded.
        """
        leaves, structure = named_arrays(batch, "batch") if self._plan else ([], None)
        if not any(map(_has_axes, leaves)):
            return batch
        if len(batch) == 1:
            for leaf in leaves:
                path = leaf.path.removeprefix("0").removeprefix(".")
                leaf.path, leaf.name = (path, f"batch.{path}") if path else ("batch", "batch")
        self._assign(leaves, structure)
        arrays = list(filter(_has_axes, leaves))
        uneven = [] if self._pads else self._rows.uneven(arrays)
        if uneven:
            raise uneven_error(uneven, fix=_FIX)
        if self._pads:
            self._rows.pad(arrays)
        return jax.tree.unflatten(structure, self._placed(leaves))

    def _assign(self, leaves: list[NamedArray], structure: Any) -> None:
        key = structure, tuple(leaf.shape for leaf in leaves)
        specs = self._specs.get(key)
        if specs is None:
            assign_specs(leaves, structure, self._mesh, self._plan, "batch")
            named = {leaf.path: leaf.value for leaf in leaves if _has_axes(leaf)}
            warn_unused(self._plan, named)
            self._specs[key] = [leaf.spec for leaf in leaves]
            return
        for leaf, spec in zip(leaves, specs, strict=True):
            leaf.spec = spec

    def _placed(self, leaves: list[NamedArray]) -> list[Any]:
        values, errors, size = [], [], 0
        for leaf in leaves:
            on_host = isinstance(leaf.value, np.ndarray)
            try:  # a step runs on while the caller fills the memory of its next batch
                position = _has_axes(leaf)
                values.append(leaf.put(self._mesh, on_host or None) if position else leaf.value)
                size += leaf.value.nbytes if on_host else 0
            except ShardingError as error:
                errors.append(error)
        raise_collected(errors)
        if size:
            metrics.record_transfer("host_to_device", size, metrics.user_location())
        return values


_FIX = (
    'a multiple of the shards; or have rows repeated: train_step(.., uneven="pad"), or '
    'iso.data.loader(.., last="pad", mask="real"), whose mask lets the loss leave them out'
)


def _has_axes(leaf: NamedArray) -> bool:
    return not leaf.is_passthrough and leaf.framework is None and bool(leaf.shape)
