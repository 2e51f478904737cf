"""What `shard`, `to_jax` and the other verbs of core do with tensors and modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import CopyError, ShardingError
from isoshard.core.frameworks import Framework
from isoshard.core.layout.mesh import ambient_mesh
from isoshard.core.layout.shards import Shard
from isoshard.core.layout.shards import local_shards as jax_shards
from isoshard.core.layout.spec import named_sharding
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.plan import Plan
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals import distributed_state, is_distributed
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.device_put import sharding_of
from isoshard.core.transfer.exchange import host_to_jax, reshard_array
from isoshard.core.transfer.host_memory import check_host
from isoshard.core.transfer.memory_kinds import in_kind, kind_of
from isoshard.core.transfer.process_local import from_local
from isoshard.core.weights.weight_errors import WeightError
from isoshard.torch_bridge._torch_internals.module_fields import forward_hooks, forward_pre_hooks
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.compiling.layout_constraints import constrain
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.subprograms.subtrace import is_recording
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval, Value

from ..common.dtypes import logical_dtype, physical_dtype
from ..common.exchange import shard_to_torch, share_with_cpu, to_numpy
from ..common.wrapper_tensors import expanded, inner_tensors, is_wrapper, rebuilt
from ..dtensor import dtensor_exchange as dtensors
from ..dtensor import dtensor_modules as dtensor_modules
from ..dtensor import resharding, routes
from ..dtensor.recognition import check_shardable, has_dtensors, is_dtensor
from ..layout.array_behind import array_behind, in_layout, users_sharding
from ..layout.inner_specs import inner_sharding, outer_sharding
from ..layout.marks import annotated
from ..layout.widths import for_jax, jax_dtype
from ..modules import modules
from ..spmd.gradients import mark_sharding_with_gradients
from ..tensors.tensor import XLAShardedTensor
from . import weight_axes
from .optimizer_state import shard_state, shards_state

_HAS_GRAPH = (
    "{} was computed from tensors that require grad, and moving it would cut the graph; move the "
    "inputs instead, or pass x.detach()"
)
_OWN = "{}: {} of {}, a tensor of its own"
_NO_ARRAY = (
    "{} is a {}, which is made of several tensors, {}, and has no one array; take those that "
    "iso.to_jax(x) returns by name, or x.dequantize(), if its class has that"
)


class Torch(Framework):
    """Core's verbs for torch tensors and modules."""

    name = "torch"
    warns_of_rules = True

    def owns(self, obj: Any) -> bool:
        """Tensors, modules and optimizers."""
        return isinstance(obj, torch.Tensor | torch.nn.Module | torch.optim.Optimizer)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> Any:
        """A tensor becomes an XLAShardedTensor; a module's parameters and buffers become that.

        The state of an optimizer is sharded as its parameters, or by rules for slots, and is stored
        in the memory that a plan's `memory` names.
        """
        if isinstance(x, torch.optim.Optimizer) and shards_state(spec, x):
            return shard_state(x, mesh, spec)
        check_shardable(x)
        if isinstance(x, torch.nn.Module):
            return modules.shard_module(x, mesh, spec, self.place, copy=copy, name=name)
        return self.place(x, _sharding(x, mesh, spec, name), copy, name or "tensor")

    def shard_padded(
        self,
        x: Any,
        mesh: Mesh,
        spec: Any,
        sizes: Any,
        *,
        copy: bool | None = None,
        name: str | None = None,
    ) -> Any:
        """A tensor in blocks of any sizes."""
        check_shardable(x)
        if isinstance(x, torch.nn.Module | torch.optim.Optimizer):
            return super().shard_padded(x, mesh, spec, sizes, copy=copy, name=name)
        layout = BlockLayout.plan(tuple(x.shape), mesh, spec, sizes)
        return self.place(x, layout, copy, name or "tensor")

    def check_shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> None:
        """Raise what `shard` would."""
        if isinstance(x, torch.optim.Optimizer) and shards_state(spec, x):
            return
        check_shardable(x)
        if isinstance(x, torch.nn.Module):
            modules.layout(x, mesh, spec, name)
            return
        sharding = _sharding(x, mesh, spec, name)
        if is_wrapper(x):
            for key, inner in inner_tensors(x).items():
                layout = inner_sharding(sharding, tuple(x.shape), tuple(inner.shape))
                self.check_shard(inner, mesh, layout, copy=copy, name=f"{name or 'tensor'}.{key}")
        elif not isinstance(x, XLAShardedTensor) and x.device.type == "cpu":
            with jax.enable_x64(True):
                check_host(to_numpy(x.detach()), sharding, copy=copy, name=name or "tensor")

    def place(
        self, x: Any, layout: sharding_ids.Layout, copy: bool | None, name: str
    ) -> torch.Tensor:
        """One tensor on the mesh; gradients and being a parameter are kept."""
        if is_wrapper(x):
            return self._place_wrapper(x, layout, copy, name)
        if x.grad_fn is not None:
            if isinstance(layout, NamedSharding) and (is_tracing() or is_recording()):
                return mark_sharding_with_gradients(x, layout.mesh, layout.spec)
            raise ShardingError(_HAS_GRAPH.format(name))
        if isinstance(x, XLAShardedTensor):
            value = lazy_tensor.read(x)
            here = recorder()
            if value.array is None or here.capture is not None or is_tracing():
                value = constrain(value, sharding_ids.intern(layout))
            else:
                old, array = value, input_placement.stored_array(value)
                with jax.enable_x64(True):
                    value = Value.of(in_layout(array, layout, copy, name), shared=True)
                old.shared |= input_placement.may_alias(array, value.array)
        elif isinstance(layout, BlockLayout):
            with jax.enable_x64(True):
                value = Value.of(in_layout(self.array(x.detach()), layout, copy, name))
        else:
            value = Value.of(self.array(x.detach(), layout, copy=copy, name=name))
        return annotated(x, value, layout, tuple(x.shape))

    def _place_wrapper(
        self, x: torch.Tensor, layout: sharding_ids.Layout, copy: bool | None, name: str
    ) -> torch.Tensor:
        """A wrapper of tensors that are each on the mesh, see `layout.inner_specs`."""
        if x.grad_fn is not None:
            raise ShardingError(_HAS_GRAPH.format(name))
        if not isinstance(layout, NamedSharding):
            raise ShardingError(
                f"{name} is a {type(x).__name__}, which is made of several tensors, and blocks of "
                "given sizes are for one array; shard it evenly, or its tensors one by one"
            )
        shape = tuple(x.shape)
        inner = {
            key: self.place(
                tensor, inner_sharding(layout, shape, tuple(tensor.shape)), copy, f"{name}.{key}"
            )
            for key, tensor in inner_tensors(x).items()
        }
        return rebuilt(x, inner)

    def from_local(
        self,
        x: Any,
        mesh: Mesh,
        spec: Any,
        *,
        shape: Any = None,
        copy: bool | None = None,
        name: str | None = None,
    ) -> torch.Tensor:
        """A tensor from this process's shards: CPU memory is shared where it is aligned."""
        if not isinstance(x, torch.Tensor) or is_dtensor(x):
            raise TypeError(
                f"from_local takes plain tensors, not a {type(x).__name__}. Convert a DTensor "
                "with iso.to_jax(x); of a module, pass a dictionary of its tensors."
            )
        if x.grad_fn is not None:
            raise ShardingError(_HAS_GRAPH.format(name or "tensor"))
        if isinstance(x, XLAShardedTensor) or x.device.type != "cpu":
            local = self.array(x.detach())
        else:
            local = to_numpy(x.detach())
        with jax.enable_x64(True):
            array = from_local(local, mesh, spec, shape=shape, copy=copy, name=name or "tensor")
        value = Value.of(array, shared=not copy)
        return annotated(x, value, array.sharding, array.shape)

    def reshard(self, x: Any, mesh: Any, spec: Any) -> Any:
        """A new tensor with another layout; for a module, its tensors are replaced."""
        if is_dtensor(x):
            return resharding.reshard(x, mesh, spec)
        if mesh is None:
            mesh = _mesh_of(x)
        if is_wrapper(x) and not isinstance(spec, NamedSharding | Plan):
            spec = in_kind(spec, mesh, x.dim(), kind_of(self.sharding_of(x)), "tensor")
        if isinstance(x, XLAShardedTensor) and not isinstance(spec, NamedSharding | Plan):
            spec = in_kind(spec, mesh, x.dim(), kind_of(x.named_sharding), "tensor")
        if isinstance(x, XLAShardedTensor) and isinstance(lazy_tensor.read(x).array, UnevenArray):
            blocks = BlockLayout.of(input_placement.stored_array(lazy_tensor.read(x)))
            return self.place(x, blocks.resharded(spec, mesh), None, "tensor")
        return self.shard(x, mesh, spec)

    def full(self, x: Any) -> Any:
        """A tensor replicated over its mesh."""
        if isinstance(x, torch.nn.Module):
            raise TypeError("full takes a tensor; for a module use reshard(module, P())")
        if is_dtensor(x):
            return resharding.full(x)
        if is_wrapper(x):
            return rebuilt(x, {key: self.full(t) for key, t in inner_tensors(x).items()})
        if not isinstance(x, XLAShardedTensor) or isinstance(lazy_tensor.read(x).array, Tracer):
            return x
        sharding = self.sharding_of(x)  # the compiler has chosen it, if no mark did
        if not any(sharding.spec):
            return x
        metrics.count("gathers")
        replicated = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return self.place(x, replicated, None, "tensor")

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """Parameters and buffers of a module, those of stacked layers layer by layer."""
        if not isinstance(x, torch.nn.Module):
            self._lacks("named arrays", x)
        return modules.named_arrays(x)

    def named_modules(self, x: Any) -> list[str] | None:
        """The names that `torch.nn.Module.named_modules` gives."""
        named = x.named_modules() if isinstance(x, torch.nn.Module) else ()
        return [name for name, _ in named] or None

    def elements(self, x: Any) -> dict[str, Any]:
        """A tensor's memory, or that of each in a module; of optimizers nothing."""
        if isinstance(x, torch.nn.Module):
            return {n: _memory(tensor) for n, tensor in expanded(modules.tensors(x)).items()}
        if is_wrapper(x):
            return {name: _memory(tensor) for name, tensor in inner_tensors(x).items()}
        return {"": _memory(x)} if isinstance(x, torch.Tensor) else {}

    def forward_hooks(self, x: Any) -> list[dict[int, Any]]:
        """Those before and those after `forward` of a module."""
        return [forward_pre_hooks(x), forward_hooks(x)] if isinstance(x, torch.nn.Module) else []

    def sharding_of(self, x: Any) -> Any:
        """The sharding; executes what is recorded if the compiler has not chosen it yet."""
        if isinstance(x, torch.nn.Module):
            if has_dtensors(x):
                return dtensor_modules.sharding_of(x)
            return {name: self.sharding_of(tensor) for name, tensor in modules.tensors(x)}
        if is_dtensor(x):
            return dtensors.sharding_of(x)
        if is_wrapper(x):
            largest = max(inner_tensors(x).values(), key=torch.Tensor.numel)
            layout = self.sharding_of(largest)
            return outer_sharding(layout, tuple(x.shape), tuple(largest.shape))
        if not isinstance(x, XLAShardedTensor):
            raise ShardingError(
                f"a tensor on {x.device} has no sharding; shard it with "
                "isoshard.shard(tensor, mesh, spec)"
            )
        if x.named_sharding is None:
            value = lazy_tensor.read(x)
            return users_sharding(value, sharding_of(input_placement.placed(value)))
        return x.named_sharding

    def typeof(self, x: Any) -> Any:
        """The type of a tensor's array."""
        if not isinstance(x, torch.Tensor):
            self._lacks("typeof", x)
        layout = self.sharding_of(x)
        with jax.enable_x64(True):
            dtype = physical_dtype(x.dtype)
            return jax.typeof(jax.ShapeDtypeStruct(tuple(x.shape), dtype, sharding=layout))

    def block_sizes(self, x: Any) -> Any:
        """Those of a tensor on the `jax` device, computing it if need be."""
        if not isinstance(x, XLAShardedTensor):
            return None
        array = input_placement.stored_array(lazy_tensor.read(x))
        return array.sizes if isinstance(array, UnevenArray) else None

    def local_shards(self, x: Any) -> list[Shard]:
        """The shards, as plain tensors over the devices' buffers."""
        if is_dtensor(x):
            return dtensors.local_shards(x)
        return [
            Shard(s.index, s.device, s.replica_id, self.shard_from_jax(s.data, copy=False))
            for s in jax_shards(self.array(x, copy=False))
        ]

    def to_jax(
        self,
        x: Any,
        sharding: Any = None,
        *,
        copy: bool | None = None,
        reduce: bool = False,
        dtype: Any = None,
        name: str = "tensor",
    ) -> Any:
        """The same values in JAX: for `jax` tensors the very array, for others through DLPack.

        A wrapper gives a dictionary, the arrays of the tensors that it is made of.
        64 bits are 32 in JAX, unless it has them on or `dtype` says otherwise: see `layout.widths`.
        """
        if isinstance(x, torch.optim.Optimizer):
            return dtensor_modules.state_to_jax(x, copy=copy)
        if isinstance(x, torch.nn.Module):
            if has_dtensors(x):
                return dtensor_modules.to_jax(x, sharding, copy=copy, reduce=reduce)
            named = expanded(modules.tensors(x)).items()
            return {key: self.to_jax(t, sharding, copy=copy, name=key) for key, t in named}
        if not isinstance(x, XLAShardedTensor) and is_wrapper(x):
            return self._inner_to_jax(x, sharding, copy, name)
        if not isinstance(x, XLAShardedTensor) and is_dtensor(x):
            return dtensors.to_jax(x, sharding, copy=copy, reduce=reduce, name=name)
        if is_distributed() and distributed_state.num_processes > 1:
            routes.log_exchange(routes.TO_JAX, partial(_OWN.format, name, tuple(x.shape), x.dtype))
        array = self.array(x, sharding, copy=copy, name=name)
        if dtype is None and array.dtype.itemsize < 8:
            return array  # only 64 bits have another dtype in JAX
        return for_jax(array, dtype, copy=copy, name=name)

    def _inner_to_jax(
        self, x: torch.Tensor, sharding: Any, copy: bool | None, name: str
    ) -> dict[str, Any]:
        """The arrays of a wrapper's tensors; `sharding` is the wrapper's."""
        arrays = {}
        for key, tensor in inner_tensors(x).items():
            layout = sharding
            if isinstance(sharding, NamedSharding):
                layout = inner_sharding(sharding, tuple(x.shape), tuple(tensor.shape))
            arrays[key] = self.to_jax(tensor, layout, copy=copy, name=f"{name}.{key}")
        return arrays

    def array(
        self, x: Any, sharding: Any = None, *, copy: bool | None = None, name: str = "tensor"
    ) -> Any:
        """The array of a plain or `jax` tensor, with all its bits; of a DTensor as `to_jax`.

        Args:
            x: a tensor.
            sharding: as for `to_jax`.
            copy: likewise.
            name: likewise.
        """
        is_ours = isinstance(x, XLAShardedTensor)
        if not is_ours and is_dtensor(x):
            return dtensors.to_jax(x, sharding, copy=copy, name=name)
        if not is_ours and is_wrapper(x):
            raise TypeError(_NO_ARRAY.format(name, type(x).__name__, ", ".join(inner_tensors(x))))
        if x.grad_fn is not None:
            raise CopyError(
                f"{name} was computed from tensors that require grad, and JAX would not see the "
                "graph; pass x.detach(), or differentiate through isoshard.jax_function"
            )
        with jax.enable_x64(True):
            if is_ours:
                return array_behind(x, sharding, copy, name)
            if x.device.type == "cpu":
                return host_to_jax(to_numpy(x.detach()), sharding, copy=copy, name=name)
            array = jnp.from_dlpack(x.detach().contiguous() if copy is not False else x.detach())
            return reshard_array(array, sharding, copy=copy, name=name)

    def weights_of(self, x: Any, *, exact: bool = False) -> dict[str, Any]:
        """What `state_dict` has; tied weights once, under the first name. On `meta`: shapes."""
        if isinstance(x, torch.optim.Optimizer):
            raise WeightError(weight_axes.NO_OPTIMIZER.format(type(x).__name__))
        read = self.array if exact else self.to_jax
        state = x.state_dict(keep_vars=True) if isinstance(x, torch.nn.Module) else {"": x}
        saved = expanded(state)
        return {
            name: read(t)
            if t.device.type != "meta"
            else jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(physical_dtype(t.dtype)))
            for name, t in expanded(modules.tensors(x)).items()
            if name in saved
        }

    def other_axes(self, x: Any) -> dict[str, str]:
        """Weights of transposed convolutions, embeddings and their kind, which are no kernels."""
        return weight_axes.other_axes(x) if isinstance(x, torch.nn.Module) else {}

    def to_numpy(self, x: Any) -> np.ndarray:
        """The memory of a plain CPU tensor."""
        if not isinstance(x, torch.Tensor) or is_dtensor(x) or x.device.type != "cpu":
            what = f"tensor on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(
                f"NumPy takes plain CPU tensors only, not a {what}; pass x.cpu(), or the "
                "jax.Array that iso.to_jax(x) gives"
            )
        return to_numpy(x.detach())

    def from_jax(
        self, array: jax.Array | UnevenArray, *, copy: bool | None = None, like: Any = None
    ) -> torch.Tensor:
        """A tensor over the very buffers of `array`."""
        if copy:
            with jax.enable_x64(True):
                array = jax.tree.map(jnp.copy, array)
        dtype = logical_dtype(array.dtype if like is None else like.dtype)
        aval = Aval.contiguous(tuple(array.shape), dtype)
        return lazy_tensor.fresh(aval, Value.of(array, shared=not copy))

    def on_cpu(self, x: Any, *, copy: bool | None = None) -> torch.Tensor:
        """A plain CPU tensor with all elements: a copy of a JAX array, unless `copy` is False."""
        if isinstance(x, torch.Tensor) and not isinstance(x, lazy_tensor.LazyTensor):
            return x.to("cpu", copy=bool(copy))
        if copy is False:
            return share_with_cpu(self.array(x) if isinstance(x, torch.Tensor) else x)
        return (x if isinstance(x, torch.Tensor) else self.from_jax(x)).cpu()

    def shard_from_jax(self, array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
        """One device's buffer as a plain CPU or CUDA tensor."""
        return shard_to_torch(array, copy=copy)


def _sharding(x: Any, mesh: Mesh, spec: Any, name: str | None) -> NamedSharding:
    shape = tuple(x.shape)
    if isinstance(spec, Plan):
        spec = spec.resolve({name or "": shape}, mesh).leaves[0].sharding
    return named_sharding(spec, mesh, x.dim(), shape=shape, name=name or "tensor")


def _mesh_of(x: Any) -> Any:
    named = modules.tensors(x) if isinstance(x, torch.nn.Module) else [("", x)]
    for tensor in expanded(named).values():
        if isinstance(tensor, XLAShardedTensor) and tensor.mesh is not None:
            return tensor.mesh
    return ambient_mesh("iso.reshard(x, mesh, spec)")


def _memory(x: torch.Tensor) -> Any:
    """The array that stores a tensor's elements; a struct where there is none yet."""
    if isinstance(x, XLAShardedTensor):
        array = None if x._chain.ops else x._storage.value.array
        if isinstance(array, jax.Array | np.ndarray):
            return array
    elif x.device.type == "cpu" and not is_dtensor(x):
        return to_numpy(x.detach())
    elif x.device.type != "meta" and not is_dtensor(x):
        return jnp.from_dlpack(x.detach().contiguous())
    return jax.ShapeDtypeStruct(tuple(x.shape), physical_dtype(x.dtype))
