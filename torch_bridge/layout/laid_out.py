"""What a tensor says of its layout: the part of `XLAShardedTensor` that is not torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from isoshard.core.mesh import mesh_of
from isoshard.torch_bridge.engine import base

from . import marks, shards
from .marks import ShardingType
from .placements import check_count, placements_of, spec_of
from .shards import XLAShard


class LaidOut(base.LazyTensor):
    """A tensor that knows how it lies on a mesh."""

    @property
    def global_tensor(self) -> LaidOut:
        """The whole tensor, which this is; `.cpu()` gathers it."""
        return self

    @property
    def named_sharding(self) -> jax.sharding.NamedSharding | None:
        """The layout its buffers have or will get, or None.

        It is what the tensor was marked with, but for axes that do not divide, which are whole.
        """
        return marks.placed(self)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh it is laid out on, or None."""
        found = marks.asked(self)
        return mesh_of(found) if found else None

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """Devices along each axis of its mesh, or None."""
        found = self.mesh
        return found.axis_sizes if found else None

    @property
    def partition_spec(self) -> jax.sharding.PartitionSpec | None:
        """How each axis is split over the mesh, or None if it is on no mesh."""
        found = marks.asked(self)
        return found.spec if found else None

    @property
    def sharding_spec(self) -> str:
        """The layout as torch_xla writes it, see `marks`; empty if it has none."""
        found = marks.asked(self)
        return marks.spec_string(found, self.dim()) if found else ""

    @property
    def sharding_type(self) -> ShardingType | None:
        """Replicated, tiled, or tiled and partly replicated; None without a layout."""
        found = marks.asked(self)
        return marks.sharding_type(found, self.dim()) if found else None

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """The layout as DTensor placements, one per mesh axis; None without a layout.

        Raises:
            UnrepresentableError: two mesh axes split one tensor axis, the right one outermost.
        """
        found = marks.asked(self)
        return placements_of(found) if found else None

    @property
    def local_shards(self) -> list[XLAShard] | None:
        """Copies of the pieces on this process's devices; None before the value is computed."""
        return shards.local_shards(self)

    def load_local_shards_(self, shards_: Sequence[XLAShard]) -> None:
        """Replace the elements by those of the pieces, in place.

        Args:
            shards_: one per device of this process, of the sizes that `local_shards` gives.

        Raises:
            RuntimeError: the tensor is not split, or the pieces do not fit.
        """
        shards.load(self, shards_)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False
    ) -> LaidOut:
        """The same elements in another layout, as a new tensor; differentiable.

        Args:
            device_mesh: an `xs.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`; its own mesh
                if not given.
            placements: one `Shard` or `Replicate` per mesh axis.
            async_op: makes no difference: everything here runs when a value is needed.

        Returns:
            The new tensor; this one stays as it is.

        Raises:
            ValueError: there are more or fewer placements than mesh axes, or no mesh.
            IndexError: a `Shard` names an axis that the tensor does not have.
            NotImplementedError: a placement is `Partial`.

        >>> import torch, isoshard.torch_bridge as xs
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
        >>> t = xs.mark_sharding(torch.ones(8, 8).to("jax"), mesh, ("x", None))
        >>> t.redistribute(mesh, [Replicate(), Shard(1)]).placements
        (Replicate(), Shard(dim=1))
        >>> t.placements
        (Shard(dim=0), Replicate())
        """
        from isoshard.torch_bridge.spmd.gradients import mark_sharding_with_gradients
        from isoshard.torch_bridge.spmd.mesh import mesh_from

        mesh = self.mesh if device_mesh is None else mesh_from(device_mesh)
        if mesh is None or placements is None:
            raise ValueError(
                "redistribute needs a mesh and placements: t.redistribute(mesh, [Shard(0)])"
            )
        check_count(placements, mesh)
        moved: Any = mark_sharding_with_gradients(self, mesh, spec_of(placements, self.dim()))
        return moved

    def full_tensor(self) -> LaidOut:
        """The same elements whole on every device, as a new tensor; differentiable."""
        from isoshard.torch_bridge.spmd.gradients import mark_sharding_with_gradients

        if self.mesh is None:
            return self
        whole: Any = mark_sharding_with_gradients(self, self.mesh, (None,) * self.dim())
        return whole

    def to_local(self) -> Any:
        """Refused: one process holds a piece per device.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a tensor here is one whole, and this process holds a piece of it on each device: "
            "tensor.local_shards lists them, tensor.full_tensor() gathers them"
        )

    def invalidate_spec_cache(self) -> None:
        """Do nothing: the layout is never cached."""
