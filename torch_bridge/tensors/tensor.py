"""XLAShardedTensor: every torch tensor on the `jax` device.

It is an ordinary `torch.Tensor` to its user: operators, modules, autograd and optimizers take it.
JAX stores its value, or will compute it; printing it, reading an element or moving it to the
CPU executes what is recorded and gathers the shards.

>>> import torch
>>> import isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.arange(8.0).to("jax"), mesh, ("y",))
>>> xs.sync()
>>> t.local_shards[1].data, t.local_shards[1].indices
(tensor([2., 3.]), [slice(2, 4, 1)])
>>> u = t + 1
>>> u.local_shards is None                       # this has not been executed yet
True
>>> u
tensor([1., 2., 3., 4., 5., 6., 7., 8.], device='jax:0', sharding=P('y',))

Source: the RFC "XLAShardedTensor and mark_sharding" of PyTorch/XLA, and torch_xla 2.9's class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import CopyError
from isoshard.core.layout.spec import SpecLike
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge._torch_internals.tensor_fields import parse_to
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceLike, MeshLike
from isoshard.torch_bridge.engine.capture import step_gradients
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.operators.reading import to_host
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.layout.layout_methods import BODIES, LayoutMethods
from isoshard.torch_bridge.overrides import addresses, pickling


class XLAShardedTensor(LayoutMethods):
    """A tensor on the `jax` device; see the module's description.

    `XLAShardedTensor(t, mesh_shape, partition_spec)` is `t` itself, marked if both are given: every
    tensor on the device is of this class. In a script of torch_xla `t` may be on the CPU, and is
    copied; and a mesh and placements may replace the shape and the spec.

    Args:
        elem: a tensor on the `jax` device.
        mesh_shape: devices along each axis of a mesh of the first devices.
        partition_spec: as for `isoshard.torch_bridge.mark_sharding`.
        **options: `requires_grad`; others make no difference.

    Raises:
        ShardingError: `elem` is on another device.
        SpecError: the spec does not fit.

    Example:
        >>> t = torch.arange(8.0, device="jax")
        >>> isinstance(t, XLAShardedTensor), t.partition_spec
        (True, None)
        >>> XLAShardedTensor(t, (2, 4), (1,)) is t, t.sharding_spec
        (True, '{devices=[4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}')
    """

    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: MeshLike = None,
        partition_spec: SpecLike = None,
        **options: Any,
    ) -> XLAShardedTensor:
        """See the class."""
        wrapped: Any = BODIES["__new__"](elem, mesh_shape, partition_spec)
        return wrapped.requires_grad_() if options.get("requires_grad") else wrapped

    @property
    def device(self) -> torch.device:
        """`jax:0`: to its user, a mesh is one device."""
        return naming.current()

    @property
    def names(self) -> tuple[None, ...]:
        """None for each axis, as of torch's tensors without names; treescope reads it."""
        return (None,) * self.dim()

    @property
    def data(self) -> torch.Tensor:
        """The same memory, outside autograd: writes to it do not count as in-place changes.

        What is assigned takes over the tensor's sharding, unless it has one itself: by
        `iso.shard`, a mark, or as a tensor on a mesh of its own.
        """
        return torch.Tensor.data.__get__(self)  # pyrefly: ignore[missing-attribute]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, XLAShardedTensor):
            raise RuntimeError(
                f"a tensor on {self.device} cannot take the data of one on {new.device}; move it "
                f"with .to({self.device.type!r}) first"
            )
        before = marks.marked(self)
        lazy_tensor.adopt(self, new)
        marks.take_over(self, before)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; None for one that a compiled step left out, which is then cleared."""
        gradient = step_gradients.raw_gradient(self)
        if gradient is not None and step_gradients.is_dropped(gradient):
            del self.grad
            return None
        return gradient

    @grad.setter
    def grad(self, new: torch.Tensor | None) -> None:
        with naming.in_users_words():
            step_gradients.GRAD.__set__(self, new)

    @grad.deleter
    def grad(self) -> None:
        step_gradients.GRAD.__delete__(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """All elements, as torch prints a tensor; its sharding, where it is split or marked.

        An unmarked tensor that is replicated over a mesh may be so only because its program
        computed something else on that mesh: `partition_spec` reports it.
        """
        if isinstance(lazy_tensor.read(self).array, Tracer):
            return f"tensor(<traced by JAX>, size={tuple(self.shape)}, dtype={self.dtype})"
        text = repr(to_host(self))
        details = [f"device={str(self.device)!r}"]
        spec = self.partition_spec
        split = spec is not None and any(entry is not None for entry in spec)
        if split or marks.marked(self) is not None:
            details.append(f"sharding={spec}")
        if self.grad_fn is not None:
            details.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            details.append("requires_grad=True")
        title = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        text = f"{text[:-1]}, {', '.join(details)})"
        if details[0] == "device='xla:0'" and self.mesh is not None:
            text = f"XLAShardedTensor({text})"  # as torch_xla's class prints itself
        return title + text

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
        parsed = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, _, memory_format = parse_to(*args, **parsed)
        naming.check_index(device)
        plain: Any = super().to
        if device is not None and device.type not in naming.OURS:
            return plain(*args, **kwargs)
        options = {"copy": kwargs.get("copy", False), "memory_format": memory_format}
        changes = {name: value for name, value in options.items() if value is not None}
        return plain(dtype or self.dtype, **changes)

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As `torch.Tensor.backward`; a gradient on another device raises, which torch forgets.

        Raises:
            RuntimeError: `gradient` is on another device, and has dimensions.
        """
        if gradient is not None and not isinstance(gradient, XLAShardedTensor):
            if gradient.dim():
                raise RuntimeError(
                    f"backward() of a tensor on {self.device} got a gradient on {gradient.device}; "
                    f"move it with .to({self.device.type!r}) first"
                )
            gradient = gradient.to("jax")
        with naming.in_users_words():
            super().backward(gradient, *args, **kwargs)

    def pin_memory(self, device: DeviceLike = None) -> torch.Tensor:
        """Refused, as for all tensors that are not on the CPU.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned"
        )

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """All elements, gathered, as a NumPy array of its own.

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

        Libraries look for it to learn whether values can be read. They do so often, so it must
        not execute anything; `isoshard.to_jax(tensor)` gives the array.

        Raises:
            AttributeError: JAX does not trace this tensor.
        """
        if not isinstance(self._storage.value.array, Tracer):
            raise AttributeError(
                f"a tensor on the {naming.current().type} device has .jax() only while JAX "
                "traces it; use "
                "isoshard.to_jax(tensor) for its array"
            )
        return lambda: lazy_tensor.read(self).array

    def resolve_conj(self) -> torch.Tensor:
        """As torch: a lazy conjugate in memory of its own."""
        return self.clone() if self._chain.ops and self._chain.ops[-1][0] == "conj" else self

    def resolve_neg(self) -> torch.Tensor:
        """As torch: a lazy negative in memory of its own."""
        return self.clone() if self._chain.ops and self._chain.ops[-1][0] == "neg" else self

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What a NumPy function makes of this tensor, as a tensor on its device."""
        return torch.as_tensor(array).to("jax")

    def tolist(self) -> Any:
        """The elements as nested lists."""
        return to_host(self).tolist()

    def data_ptr(self) -> int:
        """An address that identifies the storage; there is nothing to read. See `addresses`.

        The buffers, one on each device, are those of
        `isoshard.local_shards(tensor, framework="torch")`.
        """
        return addresses.address_of(self)

    def untyped_storage(self) -> Any:
        """Which memory it is, and how large: see `addresses.MemoryHandle`."""
        return addresses.MemoryHandle(self._storage)

    def storage(self) -> Any:
        """Refused: a storage with a dtype is there to be read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(addresses.refusal("storage()"))

    _typed_storage = storage

    def storage_type(self) -> Any:
        """Refused, likewise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(addresses.refusal("storage_type()"))

    def is_shared(self) -> bool:
        """Never with another process."""
        return False

    def share_memory_(self) -> Any:
        """Refused: no other process sees the memory.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(addresses.refusal("share_memory_()"))

    def __dlpack_device__(self) -> tuple[Any, int]:
        """The DLPack device of the only buffer."""
        return self._single_buffer().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the buffer of a tensor that is on one device.

        Raises:
            BufferError: it is on several devices, or requires a gradient.
        """
        if self.requires_grad:
            raise BufferError("a tensor that requires grad cannot be exported; use .detach()")
        return self._single_buffer().__dlpack__(**options)

    def _single_buffer(self) -> Any:
        value = lazy_tensor.read(self)
        array = input_placement.array_of(value)
        if len(array.sharding.device_set) > 1:
            raise BufferError(
                f"DLPack exports one buffer on one device, and this tensor of shape "
                f"{tuple(self.shape)} has {len(array.sharding.device_set)}; export its shards: "
                "isoshard.local_shards(tensor), or gather it with tensor.cpu()"
            )
        value.shared = True
        return array

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy with an annotation of its own, as torch makes it.

        What shares memory also does among the copies, but for parameters, whose copies have no
        gradient either.
        """
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment. Use .detach() first."
            )
        if isinstance(self, torch.nn.Parameter):
            new: Any = self.detach().clone()
            marks.copy_mark(self, new)
            memo[id(self)] = new = torch.nn.Parameter(new, self.requires_grad)
            return new
        memories: Any = memo.setdefault("jax", {})  # type: ignore[call-overload]
        if self._storage not in memories:
            aval: Any = self._storage.aval
            chain = lazy_tensor.Chain.root(aval)
            copied: Any = lazy_tensor.new_tensor(aval, self._storage, chain).clone()
            memories[self._storage] = copied._storage
        new = _over(self, memories[self._storage])
        marks.copy_mark(self, new)
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        fields, new_fields = vars(self), vars(new)
        missing = [name for name in fields if name not in new_fields]
        new_fields.update({name: copy.deepcopy(fields[name], memo) for name in missing})
        memo[id(self)] = new
        return new

    def __copy__(self) -> torch.Tensor:
        """Another tensor over the same memory, as torch makes it."""
        new = _over(self, self._storage)
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(new, self.requires_grad)
        fields, new_fields = vars(self), vars(new)
        new_fields.update({name: fields[name] for name in fields if name not in new_fields})
        return new.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as torch pickles tensors of other devices; the layout is not kept."""
        return pickling.reduced(self)


def _over(tensor: XLAShardedTensor, memory: Any) -> Any:
    """A tensor that views some memory as another one views its own."""
    offset = int(tensor.storage_offset())
    return lazy_tensor.new_tensor(tensor._aval, memory, tensor._chain, offset)


lazy_tensor.use_class(XLAShardedTensor)
