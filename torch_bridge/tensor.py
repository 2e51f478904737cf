"""XLAShardedTensor: every torch tensor on the `jax` device.

It is an ordinary `torch.Tensor` to its user: operators, modules, autograd and optimizers take it.
Its value is held, or will be computed, by JAX; printing it, reading an element or moving it to the
CPU executes what is recorded and gathers the shards.

>>> import torch
>>> import isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.arange(8.0).to("jax"), mesh, ("y",))
>>> t.local_shards is None                       # nothing has been executed yet
True
>>> xs.sync()
>>> t.local_shards[1].data, t.local_shards[1].indices
(tensor([2., 3.]), [slice(2, 4, None)])
>>> t + 1
tensor([1., 2., 3., 4., 5., 6., 7., 8.], device='jax:0', sharding=P('y',))

Source: the RFC "XLAShardedTensor and mark_sharding" of PyTorch/XLA, and torch_xla 2.9's class.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from isoshard.core.errors import CopyError
from isoshard.core.mesh import mesh_of
from isoshard.core.op_sharding import to_op_sharding
from isoshard.core.tiles import Tiles
from isoshard.torch_bridge.engine import base, layouts, placement
from isoshard.torch_bridge.engine.special import to_host

from . import pickling

_DEVICE = "jax:0"


class ShardingType(enum.IntEnum):
    """How a layout divides a tensor, with torch_xla's numbers."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclasses.dataclass
class XLAShard:
    """One device's piece of a tensor.

    Attributes:
        data: the piece as a plain tensor that shares the device's buffer (CPU and CUDA devices).
        rank: number of the device in the flattened mesh.
        indices: where the piece lies in the whole, one slice per axis.
        shard_device: the device, such as `"CPU:3"`.
        replica_id: 0 for the first device with this piece, 1 for the next.
    """

    data: torch.Tensor
    rank: int
    indices: list[slice]
    shard_device: str
    replica_id: int


class XLAShardedTensor(base.LazyTensor):
    """A tensor on the `jax` device; see the module's description."""

    @property
    def device(self) -> torch.device:
        """`jax:0`: to its user, a mesh is one device."""
        return torch.device(_DEVICE)

    @property
    def global_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered to the CPU."""
        return to_host(self)

    @property
    def named_sharding(self) -> jax.sharding.NamedSharding | None:
        """The layout: the one it was marked with, else the one its buffers have, else None."""
        if self._storage.annotation is not None and not self._chain.ops:
            return self._storage.annotation
        value = self._storage.value
        if self._chain.ops or value.layout == layouts.UNPLACED:
            return None
        found = layouts.sharding(value.layout)
        return found if isinstance(found, jax.sharding.NamedSharding) else None

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh it is laid out on, or None."""
        found = self.named_sharding
        return mesh_of(found) if found else None

    @property
    def partition_spec(self) -> jax.sharding.PartitionSpec | None:
        """How each axis is split over the mesh, or None if it is on no mesh."""
        found = self.named_sharding
        return found.spec if found else None

    @property
    def sharding_spec(self) -> str:
        """The layout as an OpSharding string; empty if it has none."""
        found = self.named_sharding
        return to_op_sharding(Tiles.from_sharding(found, self.dim())) if found else ""

    @property
    def sharding_type(self) -> ShardingType | None:
        """Replicated, tiled, or tiled and partly replicated; None without a layout."""
        found = self.named_sharding
        if found is None:
            return None
        tiles = Tiles.from_sharding(found, self.dim())
        if int(np.prod(tiles.blocks)) == 1:
            return ShardingType.REPLICATED
        return ShardingType.TILED if tiles.replicas == 1 else ShardingType.PARTIAL

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """The layout as DTensor placements, one per mesh axis; None without a layout."""
        from torch.distributed.tensor import Replicate, Shard

        found = self.named_sharding
        if found is None:
            return None
        where = {
            name: dim
            for dim, entry in enumerate(found.spec)
            for name in ((entry,) if isinstance(entry, str) else entry or ())
        }
        return tuple(
            Shard(where[name]) if name in where else Replicate() for name in found.mesh.axis_names
        )

    @property
    def local_shards(self) -> list[XLAShard] | None:
        """The pieces on this process's devices, in mesh order; None before execution."""
        value = base.read(self)
        if value.array is None or not value.placed:
            return None
        from isoshard.core.shards import local_shards

        value.shared = True
        return [
            XLAShard(
                shard.data,
                rank,
                list(shard.index),
                f"{shard.device.platform.upper()}:{shard.device.id}",
                shard.replica_id,
            )
            for rank, shard in enumerate(local_shards(value.array, framework="torch"))
        ]

    @property
    def data(self) -> torch.Tensor:
        """The same memory, outside autograd: writes to it do not count as in-place changes."""
        return torch.Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, XLAShardedTensor):
            raise RuntimeError(
                f"a tensor on {_DEVICE} cannot take the data of one on {new.device}; move it with "
                ".to('jax') first"
            )
        base.adopt(self, new)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The whole tensor, as torch prints one."""
        if isinstance(base.read(self).array, Tracer):
            return f"tensor(<traced by JAX>, size={tuple(self.shape)}, dtype={self.dtype})"
        text = repr(to_host(self))
        details = [f"device={_DEVICE!r}"]
        if self.partition_spec is not None:
            details.append(f"sharding={self.partition_spec}")
        if self.grad_fn is not None:
            details.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            details.append("requires_grad=True")
        title = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{title}{text[:-1]}, {', '.join(details)})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """As torch: a number is formatted as one."""
        if self.dim() == 0 and not self.is_meta:
            return format(self.item(), spec)
        return format(str(self), spec)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `torch.Tensor.to`; for its own device and dtype it is the tensor itself."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if [type(arg) for arg in args[-2:]] == [bool, bool]:  # non_blocking and copy, by position
            args, kwargs = args[:-1], {**kwargs, "copy": args[-1]}
        options = {name: value for name, value in kwargs.items() if name != "copy"}
        parse = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
        device, dtype, _, memory_format = parse(*args, **options)
        if device is not None and device.type != "jax":
            return super().to(*args, **kwargs)
        wanted = {"copy": kwargs.get("copy", False), "memory_format": memory_format}
        given = {name: value for name, value in wanted.items() if value is not None}
        return super().to(dtype or self.dtype, **given)

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As `torch.Tensor.backward`; a gradient on another device is refused, which torch forgets.

        Raises:
            RuntimeError: `gradient` is on another device, and has dimensions.
        """
        if gradient is not None and not isinstance(gradient, XLAShardedTensor):
            if gradient.dim():
                raise RuntimeError(
                    f"backward() of a tensor on {_DEVICE} got a gradient on {gradient.device}; "
                    "move it with .to('jax') first"
                )
            gradient = gradient.to("jax")
        super().backward(gradient, *args, **kwargs)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The whole tensor, gathered, as a NumPy array of its own.

        Raises:
            RuntimeError: it requires a gradient, and `force` is False.
        """
        return self.cpu().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """For `np.asarray`: gathers and copies."""
        if copy is False:
            raise CopyError(
                "a jax tensor becomes a NumPy array only by a copy; use isoshard.local_shards"
                "(tensor, framework='torch') to share memory with its shards"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    @property
    def jax(self) -> Callable[[], Tracer]:
        """While JAX traces, a function that gives the tracer; at other times there is no attribute.

        Libraries look for it to learn whether values can be read. They ask often, so an answer must
        not execute anything; `isoshard.to_jax(tensor)` gives the array.

        Raises:
            AttributeError: JAX does not trace this tensor.
        """
        if not isinstance(self._storage.value.array, Tracer):
            raise AttributeError(
                "a tensor on the jax device has .jax() only while JAX traces it; use "
                "isoshard.to_jax(tensor) for its array"
            )
        return lambda: base.read(self).array

    def resolve_conj(self) -> torch.Tensor:
        """As torch: a lazy conjugate in memory of its own."""
        return self.clone() if self._chain.ops and self._chain.ops[-1][0] == "conj" else self

    def resolve_neg(self) -> torch.Tensor:
        """As torch: a lazy negative in memory of its own."""
        return self.clone() if self._chain.ops and self._chain.ops[-1][0] == "neg" else self

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What a NumPy function makes of this tensor, as a tensor on its device."""
        return torch.as_tensor(array).to(_DEVICE)

    def tolist(self) -> Any:
        """The elements as nested lists."""
        return to_host(self).tolist()

    def data_ptr(self) -> int:
        """Refused: a sharded tensor has one buffer per device.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a tensor on the jax device has no single data pointer; its buffers are "
            "[shard.data for shard in tensor.local_shards] after xs.sync()"
        )

    def untyped_storage(self) -> Any:
        """Refused: its memory belongs to JAX.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the memory of a tensor on the jax device belongs to JAX; use isoshard.to_jax(tensor), "
            "or tensor.cpu() for a CPU tensor with a torch storage"
        )

    def __dlpack_device__(self) -> tuple[Any, int]:
        """The DLPack device of the only buffer."""
        array: Any = self._one_buffer()
        return array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the buffer of a tensor that lies on one device.

        Raises:
            BufferError: it lies on several devices, or requires a gradient.
        """
        if self.requires_grad:
            raise BufferError("a tensor that requires grad cannot be exported; use .detach()")
        return self._one_buffer().__dlpack__(**options)

    def _one_buffer(self) -> jax.Array:
        value = base.read(self)
        array = placement.array_of(value)
        if len(array.sharding.device_set) > 1:
            raise BufferError(
                f"DLPack knows one buffer on one device, and this tensor of shape "
                f"{tuple(self.shape)} has {len(array.sharding.device_set)}; export its shards: "
                "isoshard.local_shards(tensor), or gather it with tensor.cpu()"
            )
        value.shared = True
        return array

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy with a buffer, an annotation and gradients of its own."""
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment. Use .detach() first."
            )
        with torch.no_grad():
            new = self.detach().clone()
        new.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            new._is_param = True
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as torch pickles tensors of other devices; the layout is not kept."""
        return pickling.reduced(self)


def annotate(tensor: base.LazyTensor, sharding: jax.sharding.NamedSharding) -> None:
    """Ask for a layout; the data follows with the next execution.

    Args:
        tensor: on the `jax` device.
        sharding: fits the tensor's rank and shape.
    """
    from isoshard.torch_bridge.engine.constrain import constrain

    from .runtime import PENDING

    number = layouts.intern(sharding)
    value = base.read(tensor)
    if value.array is None or isinstance(value.array, Tracer) or tensor._chain.ops:
        base.write(tensor, constrain(value, number))
    else:
        moved = type(value)(value.array, number)
        moved.shared = value.shared
        tensor._storage.value = moved
        PENDING.append(tensor._storage)
    if not tensor._chain.ops:
        tensor._storage.annotation = sharding
        keep_gradient_layout(tensor)


def keep_gradient_layout(tensor: base.LazyTensor) -> None:
    """Lay the gradients of a leaf out as the leaf, and with them what optimizers make of them."""
    if tensor.requires_grad and tensor.is_leaf and not tensor._post_accumulate_grad_hooks:
        tensor.register_post_accumulate_grad_hook(_lay_out_gradient)


def _lay_out_gradient(leaf: Any) -> None:
    gradient = leaf.grad
    if isinstance(gradient, base.LazyTensor) and not gradient._chain.ops:
        value = gradient._storage.value
        if value.layout == layouts.UNPLACED and value.array is None:
            value.layout = leaf._storage.value.layout


base.use_class(XLAShardedTensor)
