"""Rules by size: split the largest axis of a tensor that the mesh axes divide.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan.model_leaves import ModelLeaf
>>> mesh = make_mesh((2, 4), ("fsdp", "tp"))
>>> Largest("fsdp").fit(ModelLeaf("up.kernel", (1024, 4096)), mesh, [(), ()])
P(None, 'fsdp')
>>> Largest("fsdp").fit(ModelLeaf("up.kernel", (1024, 4096)), mesh, [(), ("tp",)])
P('fsdp',)
>>> Largest("fsdp").fit(ModelLeaf("norm.scale", (1024,)), mesh, [()])
P()
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import axis_names, normalize_spec
from isoshard.core.runtime.formatting import human_bytes

from .layout_rules import Axes, PlanError, kind_of
from .model_leaves import ModelLeaf

# 1 MiB: below it are norms and biases, which save little memory and cost a collective a step.
REPLICATE_BELOW = 1 << 20


@dataclasses.dataclass(frozen=True)
class Largest:
    """Split the largest axis that the mesh axes divide, if the leaf is worth it.

    In a product of plans, an axis that no other factor splits comes first. Of axes of equal size,
    the output features come first, then the input features, so that torch's `weight[out, in, ..]`
    and Flax's `kernel[.., in, out]` of one layer are split over the same features.

    Attributes:
        axis: mesh axis or axes to split over.
        min_bytes: leaves of fewer bytes are replicated.
        stacked: the first axis counts the members of a stack (experts), and comes before larger
            ones.

    Example:
        >>> Largest(("dp", "fsdp"), min_bytes=0)
        Largest(axis=('dp', 'fsdp'), min_bytes=0)
    """

    axis: Axes
    min_bytes: int = REPLICATE_BELOW
    stacked: bool = False

    def __repr__(self) -> str:
        """The constructor's call."""
        stacked = ", stacked=True" if self.stacked else ""
        return f"Largest(axis={self.axis!r}, min_bytes={self.min_bytes}{stacked})"

    def fit(self, leaf: ModelLeaf, mesh: Mesh, taken: Sequence[tuple[str, ...]]) -> P:
        """Choose the axis.

        Args:
            leaf: the tensor.
            mesh: the mesh.
            taken: for each axis of the tensor, the mesh axes that split it already.

        Returns:
            The spec of these mesh axes alone, canonical.

        Raises:
            PlanError: no axis of the tensor is a multiple of the shards.
            SpecError: the mesh has no such axis.
        """
        ndim = len(leaf.shape)
        normalize_spec((self.axis,), mesh, 1, name=leaf.name)
        if leaf.size < self.min_bytes or not ndim:
            return P()
        shards = math.prod(mesh.shape[name] for name in axis_names(self.axis))
        best: tuple[tuple[bool, bool, float, int], int] | None = None
        for rank, axis in enumerate(_by_meaning(leaf.name, ndim)):
            before = math.prod(mesh.shape[name] for name in taken[axis])
            if leaf.shape[axis] % (before * shards) == 0:
                inside = self.stacked and axis > 0
                key = (bool(taken[axis]), inside, -leaf.shape[axis] / before, rank)
                best = min(best, (key, axis)) if best else (key, axis)
        if best is None:
            raise PlanError(
                f"{leaf.name}: no axis of shape {leaf.shape}, {human_bytes(leaf.size)}, is a "
                f"multiple of its {shards} shards over {self.axis!r}; pad one, or give the leaf a "
                "rule before this one (None replicates on purpose)"
            )
        split = (None,) * best[1] + (self.axis,)
        return normalize_spec(split, mesh, ndim, name=leaf.name)

    def settled(self, size: int) -> Largest | None:
        """The rule for slots of a parameter of `size` bytes, which are split if it is."""
        return None if size < self.min_bytes else dataclasses.replace(self, min_bytes=0)


def _by_meaning(name: str, ndim: int) -> list[int]:
    """The axes as torch orders them: output features, input features, window."""
    axes = list(range(ndim))
    return [*axes[:-3:-1], *axes[:-2]] if kind_of(name) == "kernel" else axes
