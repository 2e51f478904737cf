"""The sharding methods of `XLAShardedTensor`: those that torch's tensors do not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceTensor, DTypeLike, MeshLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.tensor_changes import namespace
from isoshard.torch_bridge.engine.values import sharding_ids

from . import marks, shard_snapshots, view_layouts
from .marks import ShardingType
from .shard_snapshots import XLAShard

Body = TypeVar("Body", bound=Callable[..., Any])

BODIES: dict[str, Callable[..., Any]] = {}
"""By the name of the method; complete once `isoshard.torch_bridge` is imported."""


def body_of(method: str) -> Callable[[Body], Body]:
    """Register a function as the implementation of a method of `XLAShardedTensor`.

    For methods that are written with tensors: their modules import the class, so the class cannot
    import them. It has the method with its signature and docstring.
    """

    def register(body: Body) -> Body:
        BODIES[method] = body
        return body

    return register


class LayoutMethods(lazy_tensor.LazyTensor):
    """A tensor with a sharding."""

    @property
    def global_tensor(self) -> LayoutMethods:
        """This tensor, which is global; `.cpu()` gathers it."""
        return self

    @property
    def named_sharding(self) -> jax.sharding.NamedSharding | None:
        """The sharding that its buffers have or will get, or None.

        It is that of its mark, but for axes that do not divide, which are replicated.
        """
        return marks.placed(self)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that it is sharded over, or None."""
        sharding = view_layouts.sharding_of_view(self)
        return mesh_of(sharding) if sharding else None

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """Devices along each axis of its mesh, or None."""
        mesh = self.mesh
        return mesh.axis_sizes if mesh else None

    @property
    def partition_spec(self) -> Any:
        """How each axis is split over the mesh, or None if it is on no mesh.

        A PartitionSpec; of a mark in a script of torch_xla (`drop_in`) the tuple that was passed.
        """
        written = marks.written(self)
        if written is not None:
            return written
        sharding = view_layouts.sharding_of_view(self)
        return sharding.spec if sharding else None

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As torch's; the gradient of a tensor on a mesh is sharded as the tensor."""
        super().requires_grad_(requires_grad)
        storage = namespace(self).get("_storage")
        if storage is not None and storage.value.layout != sharding_ids.UNPLACED:
            marks.keep_gradient_layout(self)
        return self

    @property
    def block_sizes(self) -> Sizes | None:
        """How many elements each block has, per axis, where blocks differ (None: they do not).

        None for a tensor in equal blocks, and of a value without a mark until it is computed.
        """
        blocks = sharding_ids.blocks(self._storage.value.layout)
        if blocks is None or not self._chain.ops:
            return blocks.sizes if blocks else None
        return view_layouts.sizes_of_view(self, blocks.sizes)

    @property
    def sharding_spec(self) -> str:
        """The sharding as torch_xla writes it, see `marks`; empty if it has none."""
        sharding = view_layouts.sharding_of_view(self)
        return marks.spec_string(sharding, self.dim()) if sharding else ""

    @property
    def sharding_type(self) -> ShardingType | None:
        """Replicated, tiled, or tiled and partly replicated; None without a sharding."""
        sharding = view_layouts.sharding_of_view(self)
        return marks.sharding_type(sharding, self.dim()) if sharding else None

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """The sharding as DTensor placements, one per dimension of `device_mesh`.

        If the partitioner chooses the sharding of a value that is not computed yet, it is computed
        now. None without a mesh, and while a step is captured or traced; a ValueError in scripts of
        torch_xla (`drop_in`), whose class raises one. Where several mesh axes split one tensor axis
        in another order than from the left, one of them is a `_StridedShard`.
        """
        return BODIES["placements"](self)

    @property
    def device_mesh(self) -> Any:
        """The `DeviceMesh` or submesh that it is or will be sharded over; None if it is on none."""
        return BODIES["device_mesh"](self)

    _cached_spec: Any = None

    @property
    def _spec(self) -> Any:
        """The sharding as torch's `DTensorSpec`, cached until the tensor has another.

        Raises:
            ValueError: it is on no mesh; or it is not marked while a step is captured or traced.
        """
        self._cached_spec = BODIES["_spec"](self, self._cached_spec)
        return self._cached_spec

    @property
    def _layout_key(self) -> int:
        """An id of the tensor's placements, for guards; -1 if they are not known yet."""
        return BODIES["_layout_key"](self)

    @property
    def _is_local(self) -> bool:
        """Whether a parallel style treats the tensor as local, for guards."""
        return BODIES["_is_local"](self)

    @property
    def local_shards(self) -> list[XLAShard] | None:
        """Copies of the shards on this process's devices; a marked value is computed for them.

        None for a value that is not computed yet and not marked.
        """
        return shard_snapshots.local_shards(self)

    def load_local_shards_(self, shards_: Sequence[XLAShard]) -> None:
        """Replace the elements by those of shards, in place.

        Args:
            shards_: one per device of this process, of the sizes of `local_shards`.

        Raises:
            RuntimeError: the tensor is not split, or the shards do not fit.
        """
        shard_snapshots.load(self, shards_)

    @staticmethod
    def from_local(
        local_tensor: DeviceTensor,
        device_mesh: MeshLike = None,
        placements: Sequence[Any] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Any] | None = None,
    ) -> Any:
        """The global tensor of the local tensors of all devices.

        Args:
            local_tensor: each device's shard: a tensor of `to_local()`, or computed from one; a
                list of one tensor per device, in the order of the mesh; or one ordinary tensor,
                as if all ranks had made the same; its gradient is then the mean of theirs.
            device_mesh: a mesh in any form; the current one by default.
            placements: one per mesh dimension; replicated by default. A `Partial` is summed
                (`avg`: averaged, ..) at once, so the result is replicated there.
            run_check: make replicas equal, to those of the first device, by communication.
                Without it they are assumed to be equal.
            shape: global; checked. Shards of unequal size are passed as a list.
            stride: global; passed with `shape`, and checked. Of dense shards it follows their
                order in memory, else it is row-major.
            grad_placements: for a tensor of `to_local()`, the layout of the gradient that its
                shards get: where they are copies, `Partial()` divides it among them.

        Returns:
            The whole, differentiable: shards of a split tensor get their shards of the gradient,
            copies and parts of sums the whole of it.

        Raises:
            ValueError: there is not one placement per mesh dimension; a shape does not fit.
            RuntimeError: `local_tensor` is a global tensor that is split, or a DTensor; one of
                `shape` and `stride` is missing; no mesh is passed or current.
            ShardingError: a list does not have one tensor per device; local tensors are on another
                mesh, or over dimensions that `device_mesh` does not have.
            NotImplementedError: a `Partial` is no sum, avg, min or max.
        """
        return BODIES["from_local"](
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> Any:
        """Each device's shard, as one tensor whose operations act on every device by itself.

        Of a tensor on a submesh there is a shard for each index along the submesh, and what the
        other dimensions split remains split, by the partitioner.

        Where the partitioner chooses the sharding of a value that is not computed yet, it is
        computed now. In a script of torch_xla (`drop_in`) the result is this tensor, as there.

        Args:
            grad_placements: of the gradient that the shards will have; by default those of the
                tensor. Where shards are replicas, `Partial()` adds their gradients.

        Returns:
            A tensor of the shape of one shard, with the order of axes in memory of this tensor. It
            is used with others like it and with ordinary tensors; `from_local` makes it global
            again.

        Raises:
            RuntimeError: the tensor is on no mesh.
            UnevenError: its shards are of unequal size.
            ValueError: `grad_placements` is not possible.
        """
        if naming.is_torch_xla():
            return self
        return BODIES["to_local"](self, grad_placements)

    def redistribute(
        self,
        device_mesh: MeshLike = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: DTypeLike = None,
        backward_dtype: DTypeLike = None,
    ) -> Any:
        """The same elements in another sharding, as a new tensor; twice differentiable.

        Args:
            device_mesh: a mesh in any form; by default its own, and for a value that is not
                computed yet the single mesh of its program, or the current one.
            placements: one `Shard` or `Replicate` per mesh dimension.
            async_op: ignored: everything here runs when a value is needed.
            forward_dtype: what to cast to before anything moves; also the result's.
            backward_dtype: what the gradient is cast to before it moves back.

        Returns:
            The new tensor; this one is not modified. Its gradient is sharded as this one.

        Raises:
            RuntimeError: there are no placements, or no mesh.
            ValueError: there are more or fewer placements than mesh dimensions.
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
        return BODIES["redistribute"](self, device_mesh, placements, forward_dtype, backward_dtype)

    @property
    def full_tensor(self) -> Callable[..., Any]:
        """`full_tensor(grad_placements=None)`: a new tensor, replicated; differentiable.

        Only a tensor on a mesh has it: libraries recognize a DTensor by this name.

        Args:
            grad_placements: of the gradient; by default those of this tensor. `Partial()` adds the
                gradients of all replicas, so the gradient is multiplied by their number.

        Raises:
            AttributeError: the tensor is on no mesh.
            NotImplementedError: a placement is another `Partial` than a sum.
            ValueError: there are more or fewer placements than mesh dimensions.
        """
        return BODIES["full_tensor"](self)

    def invalidate_spec_cache(self) -> None:
        """Clear the cache of `_spec`; it is also renewed whenever the sharding changes."""
        self._cached_spec = None
