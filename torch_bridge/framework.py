"""torch in core's registry: how `shard`, `to_jax` and the other verbs treat tensors and modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from isoshard.core import metrics
from isoshard.core.errors import CopyError, ShardingError
from isoshard.core.exchange import check_shareable, host_to_jax, lay_out
from isoshard.core.frameworks import Framework, register
from isoshard.core.plan import Plan
from isoshard.core.shards import Shard
from isoshard.core.shards import local_shards as jax_shards
from isoshard.core.spec import named_sharding
from isoshard.torch_bridge.engine import base, layouts, placement
from isoshard.torch_bridge.engine.constrain import constrain
from isoshard.torch_bridge.engine.value import Aval, Value, placed_layout

from . import modules
from .dtypes import logical_dtype
from .exchange import shard_to_torch, to_numpy
from .layout.marks import keep_gradient_layout
from .tensor import XLAShardedTensor


class Torch(Framework):
    """Core's verbs for torch tensors and modules."""

    name = "torch"

    def owns(self, obj: Any) -> bool:
        """Tensors and modules."""
        return isinstance(obj, torch.Tensor | torch.nn.Module)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> Any:
        """A tensor becomes an XLAShardedTensor; a module's parameters and buffers become that."""
        if isinstance(x, torch.nn.Module):
            return modules.shard_module(x, mesh, spec, self._place, copy=copy, name=name)
        return self._place(x, _sharding(x, mesh, spec, name), copy, name or "tensor")

    def check_shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> None:
        """Raise what `shard` would."""
        if isinstance(x, torch.nn.Module):
            modules.layout(x, mesh, spec, name)
            return
        sharding = _sharding(x, mesh, spec, name)
        if not isinstance(x, XLAShardedTensor) and x.device.type == "cpu":
            check_shareable(to_numpy(x.detach()), sharding, copy=copy, name=name or "tensor")

    def _place(
        self, x: torch.Tensor, sharding: NamedSharding, copy: bool | None, name: str
    ) -> torch.Tensor:
        """One tensor on the mesh; gradients and being a parameter are kept."""
        if x.grad_fn is not None:
            raise ShardingError(
                f"{name} was computed from tensors that require grad, and moving it would cut the "
                "graph; move the inputs instead, or pass x.detach()"
            )
        if isinstance(x, XLAShardedTensor):
            value = base.read(x)
            if value.array is None:
                value = constrain(value, layouts.intern(sharding))
            else:
                array = placement.array_of(value)
                value = Value.of(lay_out(array, sharding, copy=copy, name=name))
                value.shared = True
        else:
            value = Value.of(self.to_jax(x.detach(), sharding, copy=copy, name=name))
        tensor = base.fresh(Aval.contiguous(tuple(x.shape), x.dtype), value)
        tensor._storage.annotation = sharding
        tensor.requires_grad_(x.requires_grad)
        if isinstance(x, torch.nn.Parameter):
            tensor._is_param = True
        keep_gradient_layout(tensor)
        return tensor

    def reshard(self, x: Any, spec: Any, mesh: Mesh | None = None) -> Any:
        """A new tensor with another layout; for a module, its tensors are replaced."""
        if mesh is None:
            mesh = _mesh_of(x)
        return self.shard(x, mesh, spec)

    def full(self, x: Any) -> Any:
        """A tensor whole on every device of its mesh."""
        if isinstance(x, torch.nn.Module):
            raise TypeError("full takes a tensor; for a module use reshard(module, P())")
        if not isinstance(x, XLAShardedTensor):
            return x
        found = x.named_sharding
        if found is None or not any(found.spec):
            return x
        metrics.count("gathers")
        whole = NamedSharding(found.mesh, jax.sharding.PartitionSpec())
        return self._place(x, whole, None, "tensor")

    def sharding_of(self, x: Any) -> Any:
        """The layout; executes what is recorded if only the compiler knows it yet."""
        if isinstance(x, torch.nn.Module):
            return {name: self.sharding_of(tensor) for name, tensor in modules.tensors(x)}
        if not isinstance(x, XLAShardedTensor):
            raise ShardingError(
                f"a tensor on {x.device} has no layout on a mesh; lay it out with "
                "isoshard.shard(tensor, mesh, spec)"
            )
        if x.named_sharding is None:
            from isoshard.core.place import sharding_of

            return sharding_of(placement.array_of(base.read(x)))
        return x.named_sharding

    def local_shards(self, x: Any) -> list[Shard]:
        """The pieces, as plain tensors over the devices' buffers."""
        return [
            Shard(s.index, s.device, s.replica_id, self.shard_from_jax(s.data, copy=False))
            for s in jax_shards(self.to_jax(x, copy=False))
        ]

    def to_jax(
        self,
        x: Any,
        sharding: Any = None,
        *,
        copy: bool | None = None,
        name: str = "tensor",
    ) -> Any:
        """The same values in JAX: for `jax` tensors the very array, for others through DLPack."""
        if isinstance(x, torch.nn.Module):
            return {key: self.to_jax(t, sharding, copy=copy) for key, t in modules.tensors(x)}
        if x.grad_fn is not None:
            raise CopyError(
                f"{name} was computed from tensors that require grad, and JAX would not see the "
                "graph; pass x.detach(), or differentiate through isoshard.jax_function"
            )
        if isinstance(x, XLAShardedTensor):
            return _array(x, sharding, copy, name)
        if x.device.type == "cpu":
            return host_to_jax(to_numpy(x.detach()), sharding, copy=copy, name=name)
        array = jnp.from_dlpack(x.detach().contiguous() if copy is not False else x.detach())
        return lay_out(array, sharding, copy=copy, name=name)

    def from_jax(self, array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
        """A tensor over the very buffers of `array`."""
        if copy:
            array = jnp.copy(array)
        aval = Aval.contiguous(tuple(array.shape), logical_dtype(array.dtype))
        return base.fresh(aval, Value.of(array, shared=not copy))

    def shard_from_jax(self, array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
        """One device's buffer as a plain CPU or CUDA tensor."""
        return shard_to_torch(array, copy=copy)


def _array(x: XLAShardedTensor, sharding: Any, copy: bool | None, name: str) -> jax.Array:
    value = base.read(x)
    array = placement.array_of(value)
    if isinstance(array, Tracer):
        return lay_out(array, sharding)
    if copy or (sharding is not None and placed_layout(array) != layouts.intern(sharding)):
        return lay_out(array, sharding, copy=copy, name=name)
    value.shared = True
    return array


def _sharding(x: torch.Tensor, mesh: Mesh, spec: Any, name: str | None) -> NamedSharding:
    shape = tuple(x.shape)
    if isinstance(spec, Plan):
        spec = spec.spec_for(name or "", shape, mesh)
    return named_sharding(spec, mesh, x.dim(), shape=shape, name=name or "tensor")


def _mesh_of(x: Any) -> Mesh:
    tensors = [t for _, t in modules.tensors(x)] if isinstance(x, torch.nn.Module) else [x]
    for tensor in tensors:
        if isinstance(tensor, XLAShardedTensor) and tensor.mesh is not None:
            return tensor.mesh
    raise ShardingError(
        f"{type(x).__name__} lies on no mesh yet; name one: isoshard.reshard(x, spec, mesh)"
    )


register(Torch())
