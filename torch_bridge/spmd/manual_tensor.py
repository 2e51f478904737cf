"""ManualTensor: the local tensors of all devices in a manual region, as one torch tensor.

Between `enable_manual_sharding` and `disable_manual_sharding` a tensor is each device's own shard.
Underneath, the shards are stacked along a leading axis that is split over all devices, and every
operation is mapped over that axis with `torch.vmap`; so each device computes on its shard alone.

Shards may be over some axes of a mesh only, as those of a tensor on `mesh["tp"]`: then there is one
for each index along these axes, and the other axes are left to XLA's partitioner.

An operand that is not manual counts as replicated, and its gradient is the sum over the devices. So
do shards over fewer axes than those of another operand. Only along `replicated_axes`, where all
devices compute the same, as on the copies of a replicated tensor, is the gradient that of one
device, as each rank of torchrun has it, and not a sum.

Random numbers differ from device to device. In-place operations and views work. A value can be read
where all devices have the same (`agreed_value`); otherwise reading raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge._torch_internals.dispatcher import DispatchKey, DispatchKeySet, excluding
from isoshard.torch_bridge._torch_internals.tensor_fields import make_wrapper_subclass
from isoshard.torch_bridge._torch_internals.undocumented import DisableTorchFunctionSubclass
from isoshard.torch_bridge.common.argument_types import DeviceTensor, Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.layout.graph_calls import record_or_trace
from isoshard.torch_bridge.layout.layout_methods import BODIES
from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.layout.shard_snapshots import XLAShard, name_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .agreed_value import HOW, agreed
from .manual_recipes import Axes

_REPLICATED_AXES: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
"""`ManualTensor.replicated_axes`, by the memory of the stacked shards, which views share."""


class TracedMemory:
    """Stands for the memory of stacked shards where torch traces, which have none."""


class ShardKind(NamedTuple):
    """The mesh of shards, its axes that they are over, and those of them that replicate."""

    mesh: jax.sharding.Mesh
    axes: Axes
    replicated_axes: frozenset[str] = frozenset()


ShardMetadata = tuple[int, Axes, frozenset[str]]
"""A `ShardKind` that torch can compare and copy: the id of the mesh's layout for the mesh."""


class ManualTensor(XLAShardedTensor):
    """Each device's own shard of a tensor; see the module's description.

    Attributes:
        stacked: the shards, of shape (devices along `axes`, *shape).
        axes: the axes of `mesh` that the shards are over, in its order.
        memory: of `stacked`, which views share.
    """

    stacked: XLAShardedTensor
    _jax_mesh: jax.sharding.Mesh
    axes: Axes
    memory: Storage | TracedMemory

    def __getattr__(self, name: str) -> Any:
        """Raise for the fields of other device tensors: the memory, the view, the size."""
        if name in ("_storage", "_chain", "_aval"):
            raise RuntimeError(f"a manual tensor has a value per device; {HOW}")
        raise AttributeError(f"'ManualTensor' object has no attribute {name!r}")

    @classmethod
    def of(
        cls,
        stacked: DeviceTensor,
        mesh: jax.sharding.Mesh,
        axes: Axes,
        replicated_axes: frozenset[str] = frozenset(),
        viewed: ManualTensor | None = None,
    ) -> ManualTensor:
        """The tensor whose shards are stacked.

        Args:
            stacked: of shape (devices along `axes`, *shape of the result).
            mesh: the mesh.
            axes: those of its axes that the shards are over, in its order.
            replicated_axes: see the attribute.
            viewed: the tensor whose memory the result is a view of, where torch traces.
        """
        result: Any = make_wrapper_subclass(
            cls,
            stacked.shape[1:],
            strides=stacked.stride()[1:],
            dtype=stacked.dtype,
            device=torch.device("lazy", 0),
            _extra_dispatch_keys=lazy_tensor.AUTOCAST,
        )
        result.stacked, result._jax_mesh, result.axes = stacked, mesh, axes
        if isinstance(stacked, lazy_tensor.LazyTensor):
            result.memory = stacked._storage
        else:
            result.memory = TracedMemory() if viewed is None else viewed.memory
        result.replicated_axes = replicated_axes
        return result

    @classmethod
    def recorded(
        cls,
        recipe: Recipe,
        source: DeviceTensor,
        like: ShardKind,
        shape: Callable[..., Sequence[int]],
        *constants: Opaque,
    ) -> ManualTensor:
        """Shards that an entry of the program computes, or a node where torch traces.

        Args:
            recipe: from one array to stacked shards.
            source: the tensor that is read.
            like: the kind of the result.
            shape: of them stacked, `shape(shape of the source, *constants)`.
            *constants: hashable.
        """
        stacked = record_or_trace(_record, _shape_of, source, recipe, shape, *constants)
        return cls.of(stacked, like.mesh, like.axes, like.replicated_axes)

    def resized(self) -> None:
        """Take the shape that the stacked shards have by now, as after `squeeze_`."""
        now = ManualTensor.of(self.stacked, self.mesh, self.axes, self.replicated_axes, self)
        with excluding(DispatchKeySet(DispatchKey.Python)):  # below `__torch_dispatch__`
            torch.Tensor.data.__set__(self, now)  # pyrefly: ignore[missing-attribute]

    @property
    def replicated_axes(self) -> frozenset[str]:
        """The axes along which all devices have the same shard."""
        return _REPLICATED_AXES[self.memory]

    @replicated_axes.setter
    def replicated_axes(self, axes: frozenset[str]) -> None:
        _REPLICATED_AXES[self.memory] = axes

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, with copies of operands that need a summed gradient; see `with_copies`."""
        args, kwargs = BODIES["manual_function"](func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Map one operation over the devices."""
        return BODIES["manual_dispatch"](func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], ShardMetadata]:
        """What torch traces of it: the stacked shards, with their kind, which is guarded."""
        mesh = sharding_ids.intern(NamedSharding(self.mesh, P()))
        return ["stacked"], (mesh, self.axes, self.replicated_axes)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: ShardMetadata, _size: Opaque, _stride: Opaque
    ) -> ManualTensor:
        """The tensor of stacked shards that torch traces."""
        mesh, axes, replicated_axes = metadata
        sharding: Any = sharding_ids.as_named(mesh)
        return ManualTensor.of(inner["stacked"], mesh_of(sharding), axes, replicated_axes)

    def __coerce_same_metadata_as_tangent__(
        self, expected: ShardMetadata, kind: Opaque = None
    ) -> ManualTensor:
        """Check that a gradient has the kind that a compiled graph was traced for.

        Raises:
            RuntimeError: it is replicated over other axes than those it was traced for, so the
                gradients would be summed over other devices.
        """
        _, axes, replicated_axes = expected
        raise RuntimeError(
            f"the gradient of local tensors over {axes} that a compiled graph returns is "
            f"replicated over {sorted(self.replicated_axes)}, and its backward graph was traced "
            f"for a gradient replicated over {sorted(replicated_axes)}, as the tensors: it would "
            "be summed over other devices. Join them to a global tensor in the compiled function, "
            "with DTensor.from_local(..)"
        )

    def wait(self) -> ManualTensor:
        """This tensor: JAX waits for a collective where its value is read."""
        return self

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the manual region."""
        return self._jax_mesh

    @property
    def named_sharding(self) -> None:
        """None: a local tensor is on one device."""

    @property
    def partition_spec(self) -> None:
        """None: a local tensor is on one device."""

    @property
    def placements(self) -> None:
        """None: a local tensor is on one device."""

    @property
    def device_mesh(self) -> None:
        """None: a local tensor is on one device."""

    @property
    def sharding_spec(self) -> str:
        """`{manual}`, as XLA writes it."""
        return "{manual}"

    @property
    def sharding_type(self) -> ShardingType:
        """Always MANUAL."""
        return ShardingType.MANUAL

    @property
    def local_shards(self) -> list[XLAShard]:
        """Copies of each device's shard; executes what is recorded.

        Devices that differ along other axes than those of the shards have the same one, and are
        numbered as its replicas.
        """
        shards, grid = self.stacked.detach().cpu(), self._devices()
        local = [
            XLAShard(shard, ..., name_of(device), replica)
            for shard, row in zip(shards, grid, strict=True)
            for replica, device in enumerate(row)
        ]
        return sorted(local, key=lambda shard: shard.rank)

    def _devices(self) -> np.ndarray:
        """The devices, of shape (shards, devices that have the same one)."""
        names = self.mesh.axis_names
        axes = [names.index(name) for name in self.axes]
        grid = np.moveaxis(self.mesh.devices, axes, range(len(axes)))
        return grid.reshape(len(self.stacked), -1)

    def agreed(self) -> torch.Tensor:
        """The shard that every device has, on the CPU.

        Raises:
            RuntimeError: two devices have another shard.
        """
        return agreed(self.stacked, list(self._devices()[:, 0]))

    def tolist(self) -> Any:
        """The elements as nested lists, where all devices have the same."""
        return self.agreed().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shape, dtype and devices; values would have to be executed."""
        is_partial = self.axes != self.mesh.axis_names
        over = f" along {', '.join(self.axes)}" if is_partial else ""
        return (
            f"ManualTensor(shape={tuple(self.shape)}, dtype={self.dtype}, one on each of "
            f"{len(self.stacked)} devices{over})"
        )

    __str__ = __repr__


def _record(source: Any, recipe: Recipe, shape: Callable[..., Any], *constants: Any) -> Any:
    (value,) = tapes.recorder().record(recipe, [lazy_tensor.read(source)])
    extents = shape(tuple(source.shape), *constants)
    return lazy_tensor.fresh(Aval.contiguous(extents, source.dtype), value)


def _shape_of(source: Any, _recipe: Recipe, shape: Callable[..., Any], *constants: Any) -> Any:
    return shape(source, *constants)
