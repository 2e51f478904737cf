"""What a tensor says of its layout: the part of `XLAShardedTensor` that is not torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceTensor, DTypeLike, MeshLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.tensor_changes import namespace
from isoshard.torch_bridge.engine.values import layout_numbers

from . import marks, shard_snapshots, view_layouts
from .marks import ShardingType
from .method_bodies import BODIES
from .shard_snapshots import XLAShard


class LayoutMethods(lazy_tensor.LazyTensor):
    """A tensor that knows how it lies on a mesh."""

    @property
    def global_tensor(self) -> LayoutMethods:
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
        found = view_layouts.sharding_of_view(self)
        return mesh_of(found) if found else None

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """Devices along each axis of its mesh, or None."""
        found = self.mesh
        return found.axis_sizes if found else None

    @property
    def partition_spec(self) -> Any:
        """How each axis is split over the mesh, or None if it is on no mesh.

        A PartitionSpec; of a mark in a script of torch_xla (`drop_in`) the tuple that is there.
        """
        written = marks.written(self)
        if written is not None:
            return written
        found = view_layouts.sharding_of_view(self)
        return found.spec if found else None

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As torch's; the gradient of a tensor on a mesh lies as the tensor."""
        super().requires_grad_(requires_grad)
        storage = namespace(self).get("_storage")
        if storage is not None and storage.value.layout != layout_numbers.UNPLACED:
            marks.keep_gradient_layout(self)
        return self

    @property
    def block_sizes(self) -> Sizes | None:
        """How many elements each block has, per axis, where blocks differ (None: they do not).

        None for a tensor in equal blocks, and before a value is computed that nobody marked.
        """
        found = layout_numbers.blocks(self._storage.value.layout)
        if found is None or not self._chain.ops:
            return found.sizes if found else None
        return view_layouts.sizes_of_view(self, found.sizes)

    @property
    def sharding_spec(self) -> str:
        """The layout as torch_xla writes it, see `marks`; empty if it has none."""
        found = view_layouts.sharding_of_view(self)
        return marks.spec_string(found, self.dim()) if found else ""

    @property
    def sharding_type(self) -> ShardingType | None:
        """Replicated, tiled, or tiled and partly replicated; None without a layout."""
        found = view_layouts.sharding_of_view(self)
        return marks.sharding_type(found, self.dim()) if found else None

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """The layout as DTensor placements, one per dimension of `device_mesh`.

        Where the partitioner chooses the layout of a value that is not computed yet, it is computed
        now. None without a mesh, and while a step is captured or traced; a ValueError in scripts of
        torch_xla (`drop_in`), whose class raises one. Where several mesh axes split one tensor axis
        in another order than from the left, one of them is a `_StridedShard`.
        """
        return BODIES["placements"](self)

    @property
    def device_mesh(self) -> Any:
        """The `DeviceMesh` (or part of one) that it lies on, or will; None if on none."""
        return BODIES["device_mesh"](self)

    _cached_spec: Any = None

    @property
    def _spec(self) -> Any:
        """The layout as torch's `DTensorSpec`, kept until the tensor is laid out otherwise.

        Raises:
            ValueError: it is on no mesh; or nobody marked it while a step is captured or traced.
        """
        self._cached_spec = BODIES["_spec"](self, self._cached_spec)
        return self._cached_spec

    @property
    def _layout_key(self) -> int:
        """A number that says how the tensor lies, for guards; -1 if that is not known yet."""
        return BODIES["_layout_key"](self)

    @property
    def _of_pieces(self) -> bool:
        """Whether a parallel style made the tensor of pieces, for guards."""
        return BODIES["_of_pieces"](self)

    @property
    def local_shards(self) -> list[XLAShard] | None:
        """Copies of the pieces on this process's devices; a marked value is computed for it.

        None for a value that is not computed yet and that nobody has marked.
        """
        return shard_snapshots.local_shards(self)

    def load_local_shards_(self, shards_: Sequence[XLAShard]) -> None:
        """Replace the elements by those of the pieces, in place.

        Args:
            shards_: one per device of this process, of the sizes that `local_shards` gives.

        Raises:
            RuntimeError: the tensor is not split, or the pieces do not fit.
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
        """The whole that the local tensors of all devices make.

        Args:
            local_tensor: what each device holds: a tensor of `to_local()`, or computed from one;
                a list of one tensor per device, in the order of the mesh; or one ordinary tensor,
                which stands for every device's own, as if all ranks had made the same; its
                gradient is then the mean of theirs.
            device_mesh: a mesh in any form; the current one if not given.
            placements: one per mesh dimension; copies on every device if not given. A `Partial`
                is summed (`avg`: averaged, ..) at once, so the whole is replicated there.
            run_check: make copies equal, to those of the first device, by communication. Without
                it they are promised to be equal.
            shape: of the whole; checked. Pieces of unequal size come as a list.
            stride: of the whole; given with `shape`, and checked. Of dense pieces it is that of
                the order in which they lie in memory, else row-major.
            grad_placements: for a tensor of `to_local()`, the layout of the gradient that its
                pieces get: where they are copies, `Partial()` divides it among them.

        Returns:
            The whole, differentiable: pieces of a split tensor get their pieces of the gradient,
            copies and parts of sums the whole of it.

        Raises:
            ValueError: there is not one placement per mesh dimension; a shape does not fit.
            RuntimeError: `local_tensor` is a whole that is split, or a DTensor; one of `shape` and
                `stride` is missing; no mesh is given or current.
            ShardingError: a list does not have one tensor per device; local tensors lie on another
                mesh, or over dimensions that `device_mesh` does not have.
            NotImplementedError: a `Partial` is no sum, avg, min or max.
        """
        return BODIES["from_local"](
            local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> Any:
        """Each device's piece, as one tensor whose operations act on every device by itself.

        Of a tensor that lies on a part of a mesh there is a piece for each place along that part,
        and what the other dimensions split stays split: the partitioner sees to it.

        Where the partitioner chooses the layout of a value that is not computed yet, it is
        computed now. In a script of torch_xla (`drop_in`) it is the whole tensor, as there.

        Args:
            grad_placements: the layout of the gradient that the pieces will have; that of the
                tensor if not given. Where they are copies, `Partial()` adds their gradients.

        Returns:
            A tensor of the shape of one piece, its axes in memory in the order of the whole's, to
            be used with others like it and with ordinary tensors; `from_local` makes it a whole
            again.

        Raises:
            RuntimeError: the tensor lies on no mesh.
            UnevenError: its pieces are of unequal size.
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
        """The same elements in another layout, as a new tensor; twice differentiable.

        Args:
            device_mesh: a mesh in any form; its own if not given, and for a value that is not
                computed yet the one mesh of its program, or the current one.
            placements: one `Shard` or `Replicate` per mesh dimension.
            async_op: makes no difference: everything here runs when a value is needed.
            forward_dtype: what to cast to before anything moves; also the result's.
            backward_dtype: what the gradient is cast to before it moves back.

        Returns:
            The new tensor; this one stays as it is. Its gradient goes back to this one's layout.

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
        """`full_tensor(grad_placements=None)`: a new tensor, whole on every device; differentiable.

        Only a tensor on a mesh has it: libraries look for the name to know a DTensor.

        Args:
            grad_placements: the layout of the gradient as it comes back; that of this tensor if
                not given. `Partial()` adds the gradient of each device's copy, which is the one
                that comes back, times the devices.

        Raises:
            AttributeError: the tensor is on no mesh.
            NotImplementedError: a placement is another `Partial` than a sum.
            ValueError: there are more or fewer placements than mesh dimensions.
        """
        return BODIES["full_tensor"](self)

    def invalidate_spec_cache(self) -> None:
        """Forget `_spec`. Nobody needs to: it is made anew when the layout is another."""
        self._cached_spec = None
