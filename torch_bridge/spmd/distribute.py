"""torch_xla's `xla_distribute_tensor` and `xla_distribute_module`: DTensor's API over marks.

>>> import torch, isoshard.torch_bridge as xs
>>> from torch.distributed.tensor import Replicate, Shard
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xla_distribute_tensor(torch.ones(8, 6), mesh, [Shard(0), Shard(0)])
>>> t.partition_spec, t.placements
(P(('x', 'y'),), (Shard(dim=0), Shard(dim=0)))

`torch.distributed.tensor.distribute_tensor` with a `DeviceMesh("xla", ..)` calls this too, when
`torch_xla` is isoshard's (see `isoshard.torch_xla_bridge.drop_in`). Such a mesh needs no process
group.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.placements.translation import check_count, spec_of
from isoshard.torch_bridge.spmd import modes
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .auto import auto_mesh, auto_policy
from .mark_errors import MeshDeviceError
from .marking import mark_sharding
from .mesh import Mesh, mesh_from


def convert_to_xla_mesh(dt_mesh: MeshLike) -> Mesh:
    """An `xs.Mesh` with the devices, shape and names of another mesh.

    Args:
        dt_mesh: a torch `DeviceMesh`, whose ranks are indices in `jax.devices()`; an `xs.Mesh`; or
            a `jax.sharding.Mesh`.

    Raises:
        ShardingError, DeviceError: it has a device twice, or more devices than JAX.
        DeviceError: in a script of torch_xla, which asserts it: a `DeviceMesh` has some of the
            devices only.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> convert_to_xla_mesh(DeviceMesh("xla", torch.arange(8).reshape(2, 4)))
    Mesh([0, 1, 2, 3, 4, 5, 6, 7], (2, 4), None)
    """
    mesh, count = mesh_from(dt_mesh), len(jax.devices())
    if naming.is_torch_xla() and mesh is not dt_mesh and mesh.size() != count:
        raise MeshDeviceError(
            f"convert_to_xla_mesh takes a mesh of all {count} devices, and this one has "
            f"{mesh.size()}; write xs.Mesh(device_ids, mesh_shape, axis_names) for some of them"
        )
    return mesh


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Any]
) -> tuple[Any, ...]:
    """The partition spec, by mesh axis indices, of DTensor placements.

    Several mesh axes may split one tensor axis; the left one is outermost.

    Args:
        tensor: of any device; only its rank is used.
        placements: one `Shard` or `Replicate` per mesh axis.

    Raises:
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> convert_to_xla_partition_spec(torch.ones(8, 8), [Shard(0), Shard(0)])
    ((0, 1), None)
    """
    return spec_of(placements, tensor.dim())


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: MeshLike, placements: Sequence[Any] | None = None
) -> XLAShardedTensor:
    """Shard a tensor over a mesh by placements.

    Args:
        tensor: on any device; one on another device is copied, a leaf to a leaf.
        device_mesh: a torch `DeviceMesh`, an `xs.Mesh` or a `jax.sharding.Mesh`.
        placements: one `Shard` or `Replicate` per mesh axis; replicated if not given.

    Returns:
        The marked tensor; `tensor` itself if it is on the device.

    Raises:
        ValueError: there are more or fewer placements than mesh axes.
        ShardingError: the mesh is for another device, `tensor` is a DTensor, or another mark splits
            it already.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
        >>> xs.xla_distribute_tensor(torch.ones(8, 6), mesh, [Replicate(), Shard(0)]).partition_spec
        P('y',)
    """
    kind = getattr(device_mesh, "device_type", "jax")
    if kind not in (*naming.OURS, "cpu"):
        raise ShardingError(
            f"xla_distribute_tensor takes a mesh of device type 'xla' or 'jax', and this one has "
            f"type {kind!r}; use torch.distributed.tensor.distribute_tensor for it"
        )
    if type(tensor).__name__ == "DTensor":
        raise ShardingError(
            "xla_distribute_tensor takes a global tensor, and a DTensor has one process's shard; "
            "pass tensor.full_tensor()"
        )
    mesh = mesh_from(device_mesh)
    if placements is None:
        spec: tuple[Any, ...] = (None,) * tensor.dim()
    else:
        check_count(placements, mesh)
        spec = spec_of(placements, tensor.dim(), mesh.mesh_shape)
    if not isinstance(tensor, XLAShardedTensor):
        leaf = tensor.detach() if tensor.is_leaf else tensor
        tensor = leaf.to("jax").requires_grad_(tensor.requires_grad)
    return mark_sharding(tensor, mesh, spec)


def xla_distribute_module(
    module: torch.nn.Module,
    device_mesh: MeshLike = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> torch.nn.Module:
    """Shard a module over a mesh by a function, or by `auto_policy`.

    What `partition_fn` does not mark is left to XLA's partitioner.

    Args:
        module: changed in place. With `auto_policy` it may be on any device, and is moved.
        device_mesh: in any form; passed to the functions as it is.
        partition_fn: called as `partition_fn(name, submodule, device_mesh)` for every submodule,
            the module itself included (its name is empty). `auto_policy` shards parameters by the
            rule it describes.
        input_fn: called as `input_fn(module, inputs, device_mesh)` before each forward pass; what
            it returns, unless None, replaces the inputs.
        output_fn: called as `output_fn(module, outputs, device_mesh)` after it, in the same way.

    Returns:
        `module`.

    Raises:
        ValueError: a function takes another number of arguments.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> def split(name, module, mesh):
        ...     if isinstance(module, torch.nn.Linear):
        ...         xs.mark_sharding(module.weight, mesh, ("x", None))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8)).to("jax")
        >>> xs.xla_distribute_module(model, xs.get_1d_mesh("x"), split)[0].weight.partition_spec
        P('x',)
    """
    before = input_fn and with_module("input_fn", input_fn)
    after = output_fn and with_module("output_fn", output_fn)
    if partition_fn is auto_policy:
        if naming.is_torch_xla():
            modes.use_spmd(auto=True)  # as torch_xla's policy does
        module = module.to("jax")
        mesh = auto_mesh(device_mesh)
        for name, child in module.named_modules():
            auto_policy(name, child, mesh)
    elif partition_fn is not None:
        for name, child in module.named_modules():
            partition_fn(name, child, device_mesh)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, device_mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, device_mesh))
    return module


def with_module(argument: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (module, values, device_mesh), from one that may take the last two only.

    Args:
        argument: the name of the argument that it is passed as, for messages.
        function: of two or three arguments.

    Raises:
        ValueError: it takes another number of arguments.
    """
    count = len(inspect.signature(function).parameters)
    if count not in (2, 3):
        raise ValueError(
            f"{argument} is called with (module, values, device_mesh), and this one takes {count} "
            "arguments"
        )
    if count == 3:
        return function
    warnings.warn(
        f"Deprecating {argument} with two arguments (values, device_mesh); take "
        "(module, values, device_mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda mod, values, mesh: function(values, mesh)
