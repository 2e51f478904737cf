"""ManualTensor: one tensor per device, written as one.

Between `enable_manual_sharding` and `disable_manual_sharding` a tensor is each device's own piece.
Underneath, the pieces are stacked along a leading axis that is split over all devices, and every
operation is mapped over that axis with `torch.vmap`; so each device computes on its piece alone.

Pieces may be over some axes of a mesh only, as those of a tensor that lies on `mesh["tp"]`: then
there is one for each place along these axes, and the others are left to XLA's partitioner.

A tensor that is not manual takes part as it is, the same on every device, and its gradient is the
sum of theirs. So do pieces over fewer axes than those they meet. Only where all devices are known
to compute the same (`alike`), as on the copies of a replicated tensor, that is one gradient, as
each rank of torchrun has it, and not a sum.

Random numbers differ from device to device. In-place operations and views work. A value can be read
where all devices have the same (`agreed_value`), and otherwise is refused.
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
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.layout.graph_calls import laid_by
from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.layout.method_bodies import BODIES
from isoshard.torch_bridge.layout.shard_snapshots import XLAShard, name_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .agreed_value import HOW, agreed
from .manual_recipes import Axes

_ALIKE: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
"""What `ManualTensor.alike` says, by the memory of the stacked pieces, which views share."""


class TracedMemory:
    """Stands for the memory of stacked pieces where torch traces, which have none."""


class ShardKind(NamedTuple):
    """What pieces are: the mesh, its axes that they are over, and `alike`."""

    mesh: jax.sharding.Mesh
    axes: Axes
    alike: frozenset[str] = frozenset()


ShardNumbers = tuple[int, Axes, frozenset[str]]
"""A `ShardKind` that torch can compare and copy: the number of the mesh's layout for the mesh."""


class ManualTensor(XLAShardedTensor):
    """Each device's own piece of a tensor; see the module's description.

    Attributes:
        stacked: the pieces, of shape (devices along `axes`, *shape).
        home: the mesh.
        axes: its axes that the pieces are over, in its order.
        memory: of `stacked`, which views share.
    """

    stacked: XLAShardedTensor
    home: jax.sharding.Mesh
    axes: Axes
    memory: Storage | TracedMemory

    def __getattr__(self, name: str) -> Any:
        """Refuse what the verbs for other tensors ask for first: the memory, the view, the size."""
        if name in ("_storage", "_chain", "_aval"):
            raise RuntimeError(f"a manual tensor has a value per device; {HOW}")
        raise AttributeError(f"'ManualTensor' object has no attribute {name!r}")

    @classmethod
    def of(
        cls,
        stacked: DeviceTensor,
        mesh: jax.sharding.Mesh,
        axes: Axes,
        alike: frozenset[str] = frozenset(),
        shown: ManualTensor | None = None,
    ) -> ManualTensor:
        """The tensor whose pieces are stacked.

        Args:
            stacked: of shape (devices along `axes`, *shape of the result).
            mesh: the mesh.
            axes: those of its axes that the pieces are over, in its order.
            alike: see the attribute.
            shown: the tensor whose memory the result is a view of, where torch traces.
        """
        result: Any = make_wrapper_subclass(
            cls,
            stacked.shape[1:],
            strides=stacked.stride()[1:],
            dtype=stacked.dtype,
            device=torch.device("lazy", 0),
            _extra_dispatch_keys=lazy_tensor.AUTOCAST,
        )
        result.stacked, result.home, result.axes = stacked, mesh, axes
        if isinstance(stacked, lazy_tensor.LazyTensor):
            result.memory = stacked._storage
        else:
            result.memory = TracedMemory() if shown is None else shown.memory
        result.alike = alike
        return result

    @classmethod
    def made(
        cls,
        recipe: Recipe,
        source: DeviceTensor,
        like: ShardKind,
        shape: Callable[..., Sequence[int]],
        *given: Opaque,
    ) -> ManualTensor:
        """Pieces that an entry of the program computes, or a node where torch traces.

        Args:
            recipe: from one array to stacked pieces.
            source: the tensor that is read.
            like: what they are.
            shape: of them stacked, `shape(shape of the source, *given)`.
            *given: hashable.
        """
        stacked = laid_by(_recorded, _shape_of, source, recipe, shape, *given)
        return cls.of(stacked, like.mesh, like.axes, like.alike)

    def resized(self) -> None:
        """Take the shape that the stacked pieces have by now, as after `squeeze_`."""
        now = ManualTensor.of(self.stacked, self.home, self.axes, self.alike, self)
        with excluding(DispatchKeySet(DispatchKey.Python)):  # below `__torch_dispatch__`
            torch.Tensor.data.__set__(self, now)  # pyrefly: ignore[missing-attribute]

    @property
    def alike(self) -> frozenset[str]:
        """The axes along which all devices are known to have the same."""
        return _ALIKE[self.memory]

    @alike.setter
    def alike(self, axes: frozenset[str]) -> None:
        _ALIKE[self.memory] = axes

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let what requires a gradient and is whole, or over fewer axes, take part by copies."""
        given = BODIES["manual_function"](func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Map one operation over the devices."""
        return BODIES["manual_dispatch"](func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], ShardNumbers]:
        """What torch traces of it: the stacked pieces; and what they are, which is guarded."""
        mesh = layout_numbers.intern(NamedSharding(self.home, P()))
        return ["stacked"], (mesh, self.axes, self.alike)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], numbers: ShardNumbers, _size: Opaque, _stride: Opaque
    ) -> ManualTensor:
        """The tensor of stacked pieces that torch traces."""
        mesh, axes, alike = numbers
        whole: Any = layout_numbers.as_named(mesh)
        return ManualTensor.of(inner["stacked"], mesh_of(whole), axes, alike)

    def __coerce_same_metadata_as_tangent__(
        self, expected: ShardNumbers, kind: Opaque = None
    ) -> ManualTensor:
        """The gradient that a compiled graph was traced for: it is this one, or it is refused.

        Raises:
            RuntimeError: devices have the same along other axes than those it was traced for, so
                another sum would be taken.
        """
        _, axes, alike = expected
        raise RuntimeError(
            f"the gradient of pieces over {axes} that a compiled graph returns is alike along "
            f"{sorted(self.alike)}, and its backward graph was traced for one that is alike along "
            f"{sorted(alike)}, as the pieces: other gradients would be summed over devices. Make "
            "the pieces a whole in the compiled function, with DTensor.from_local(..)"
        )

    def wait(self) -> ManualTensor:
        """The tensor: JAX waits for a collective where its value is read."""
        return self

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the manual region."""
        return self.home

    @property
    def named_sharding(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def partition_spec(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def placements(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def device_mesh(self) -> None:
        """None: a piece is whole on its device."""

    @property
    def sharding_spec(self) -> str:
        """XLA's word for it."""
        return "{manual}"

    @property
    def sharding_type(self) -> ShardingType:
        """Always MANUAL."""
        return ShardingType.MANUAL

    @property
    def local_shards(self) -> list[XLAShard]:
        """Copies of each device's piece; executes what is recorded.

        Devices that differ along other axes than those of the pieces have the same one, and are
        numbered as its replicas.
        """
        pieces, grid = self.stacked.detach().cpu(), self._devices()
        found = [
            XLAShard(piece, ..., name_of(device), replica)
            for piece, row in zip(pieces, grid, strict=True)
            for replica, device in enumerate(row)
        ]
        return sorted(found, key=lambda shard: shard.rank)

    def _devices(self) -> np.ndarray:
        """The devices, of shape (pieces, devices that have the same one)."""
        names = self.home.axis_names
        own = [names.index(name) for name in self.axes]
        grid = np.moveaxis(self.home.devices, own, range(len(own)))
        return grid.reshape(len(self.stacked), -1)

    def agreed(self) -> torch.Tensor:
        """The piece that every device has, on the CPU.

        Raises:
            RuntimeError: two devices have another piece.
        """
        return agreed(self.stacked, list(self._devices()[:, 0]))

    def tolist(self) -> Any:
        """The elements as nested lists, where all devices have the same."""
        return self.agreed().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shape, dtype and devices; values would have to be executed."""
        some = self.axes != self.home.axis_names
        along = f" along {', '.join(self.axes)}" if some else ""
        return (
            f"ManualTensor(shape={tuple(self.shape)}, dtype={self.dtype}, one on each of "
            f"{len(self.stacked)} devices{along})"
        )

    __str__ = __repr__


def _recorded(source: Any, recipe: Recipe, shape: Callable[..., Any], *given: Any) -> Any:
    (value,) = tapes.recorder().record(recipe, [lazy_tensor.read(source)])
    extents = shape(tuple(source.shape), *given)
    return lazy_tensor.fresh(Aval.contiguous(extents, source.dtype), value)


def _shape_of(source: Any, _recipe: Recipe, shape: Callable[..., Any], *given: Any) -> Any:
    return shape(source, *given)
