"""Exchange: a DTensor's local tensors are the shards of one `jax.Array`, and the reverse.

Under torchrun there is one process per device. Rank `r` holds one local tensor of a DTensor; the
same memory becomes the shard of process `r` in a `jax.Array` over all processes, and nothing is
sent, gathered or copied:

    weight = iso.to_jax(dtensor)                    # in every rank
    new = jax.jit(step)(weight)                     # one program over all ranks
    dtensor = iso.to_dtensor(new, device_mesh)      # over the buffers of `new`

The first exchange of a new mesh, shape, dtype and placements compares them between the ranks of the
mesh, so all ranks must make it; later ones communicate nothing, and take as long for a kilobyte as
for a gigabyte.

Writes to shared memory show on both sides: a write of torch to a local tensor changes the JAX
array, which JAX takes for immutable. Do not write while JAX uses it, or pass copy=True. The memory
lives as long as either side. A donated array (`jax.jit(.., donate_argnums=..)`) is copied by JAX,
not overwritten, while torch shares it.

A local tensor that is not C-contiguous, or starts off a 64-byte boundary, must be copied (counted
in `metrics`; an error under copy=False), and so must 64-bit integers while `jax_enable_x64` is off.
Shards that differ in size become an `UnevenArray` over padded memory. A short local tensor is
copied there, unless it is the start of a storage of just the padded size, as FSDP2 makes them:
then that storage is shared.

A rank outside the mesh has an empty local tensor in torch and an array without shards in JAX. It
can pass them on; only the ranks of the mesh can compute with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import CopyError, ShardingError, raise_collected
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.partial_sums import check_no_sums
from isoshard.core.layout.shards import Shard
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.exchange import device_dtype, reshard_array
from isoshard.torch_bridge.common.argument_types import ArrayLike, Leaf
from isoshard.torch_bridge.common.dtypes import numpy_dtype

from . import routes, shard_memory
from .recognition import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_REDUCE = "Take the sum first: x.redistribute(..), or iso.full(x)."


def to_jax(
    x: Leaf,
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    name: str = "DTensor",
) -> jax.Array | UnevenArray:
    """Give a DTensor's shards as one `jax.Array` over the processes of its mesh.

    Args:
        x: a DTensor; one that requires grad must be a leaf.
        sharding: another layout to move to, by JAX. None keeps the one of `x`.
        copy: None shares this rank's memory where it can, False shares it or raises, True copies.
        reduce: let torch reduce `Partial` placements to `Replicate` first. Without it sums become
            unreduced axes, and other partial values are an error.
        name: of the tensor, for messages.

    Returns:
        The array; an `UnevenArray` if the shards differ in size.

    Raises:
        CopyError: memory cannot be shared under copy=False, JAX has no such dtype or value, or
            `x` was computed from tensors that require grad.
        UnrepresentableError: no PartitionSpec expresses the placements.
        ShardingError: the local tensor is not of the size that the placements give it.
        DistributedError: the ranks exchange different tensors.
        TypeError: the local tensors are not plain, or not on the CPU or a GPU.
    """
    if x.grad_fn is not None:
        raise CopyError(
            f"{name} was computed from tensors that require grad, and JAX would not see the graph; "
            "pass x.detach(), or call the JAX function through isoshard.torch_function, which "
            "gives gradients to DTensors"
        )
    if reduce:
        x = reduced(x)
    shard = routes.RankShard.of(x, name)
    route = routes.resolved(shard.key)
    if route is None:
        routes.resolve(routes.TO_JAX, [routes.outbound(shard)])
        route = routes.resolved(shard.key)
    else:
        routes.log_exchange(routes.TO_JAX, shard.describer())
    array = array_of_local(route, shard.local, copy=copy, name=name)
    if sharding is None:
        return array
    if isinstance(array, UnevenArray):
        raise ShardingError(
            f"{name}: its shards differ in size ({array!r}), and resharding needs equal ones; call "
            "it without a sharding, or call x.redistribute(..) first"
        )
    return reshard_array(array, sharding, copy=copy, name=name)


def to_dtensor(
    array: ArrayLike, device_mesh: DeviceMesh | None = None, *, copy: bool | None = None
) -> Any:
    """Give the shards of a `jax.Array` over the processes as a DTensor.

    Args:
        array: a jax.Array with one device in each process of its mesh, an UnevenArray, or a
            container of those.
        device_mesh: of the DTensor. By default the one with the order and names of the array's
            mesh; it may have another order or shape over the same devices, if placements on it
            give every rank the shard that it has.
        copy: None and False share this process's buffer, True copies it.

    Returns:
        The DTensor, which requires no grad. Writing to it changes an array that JAX takes for
        immutable. In a rank outside the mesh its local tensor is empty.

    Raises:
        UnrepresentableError: no placements on `device_mesh` express the array's sharding.
        ShardingError: the array is traced, or has no mesh of one device per process. In a
            container all such errors are in one.
        DistributedError: the ranks exchange different arrays.
        TypeError: a leaf is no such array.

    Example:
        >>> import torch.distributed as dist
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> device_mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
        >>> array = shard([[1.0], [2.0]], make_mesh((1,), ("x",)), ("x",))
        >>> to_dtensor(array, device_mesh).placements       # of two ranks, each would hold a row
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    if isinstance(array, jax.Array | UnevenArray):
        return _dtensor(array, device_mesh, copy, "array")
    leaves, structure = jax.tree.flatten_with_path(array, is_leaf=_is_array)
    named = [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in leaves]
    try:
        questions = _questions(named, device_mesh)
    except (ShardingError, TypeError) as error:
        routes.report_failure(error, device_mesh)
        raise
    routes.resolve(routes.FROM_JAX, questions)
    dtensors = [_dtensor(leaf, device_mesh, copy, name) for name, leaf in named]
    return jax.tree.unflatten(structure, dtensors)


def array_of_local(
    route: routes.Route, local: torch.Tensor, *, copy: bool | None, name: str
) -> jax.Array | UnevenArray:
    """The array of a route, with this rank's local tensor as its shard.

    Args:
        route: of the DTensor.
        local: its local tensor.
        copy: as for `to_jax`.
        name: of the tensor, for messages.

    Returns:
        The array; an `UnevenArray` if the shards differ in size.

    Raises:
        CopyError, ShardingError: as `to_jax`.
    """
    layout = route.layout
    if route.device is None:
        shards = []
    else:
        if tuple(local.shape) != route.block:
            route.check(local, name)
            local, copy = shard_memory.padded(local, route.block, copy, name)
        shards = [shard_memory.shard_of(local, route.device, copy, name)]
    array = jax.make_array_from_single_device_arrays(
        layout.padded,
        layout.sharding,
        shards,
        dtype=shards[0].dtype if shards else device_dtype(numpy_dtype(local.dtype), name),
    )
    return array if layout.is_even else UnevenArray(array, layout.shape, layout.sizes)


def sharding_of(x: DTensor) -> NamedSharding:
    """The layout of a DTensor in JAX; that of the padded array if its shards differ in size.

    Args:
        x: any DTensor.

    Returns:
        The sharding.

    Raises:
        UnrepresentableError: no PartitionSpec expresses the placements.
    """
    return routes.route_of(x.device_mesh, x.placements, x.shape).layout.sharding


def local_shards(x: DTensor) -> list[Shard]:
    """This rank's shard, over the local tensor's memory; none in a rank outside the mesh.

    Args:
        x: any DTensor.

    Returns:
        A list of one Shard, whose data is a plain tensor.

    Raises:
        UnrepresentableError: no PartitionSpec expresses the placements, or one is `Partial`.
    """
    route = routes.route_of(x.device_mesh, x.placements, x.shape)
    if route.device is None:
        return []
    index = tuple(
        slice(None) if size == full_size else slice(start, start + size)
        for start, size, full_size in zip(
            route.offset, route.local, route.layout.shape, strict=True
        )
    )
    check_no_sums(route.layout.sharding, "this rank has a term (x.to_local()), no shard", _REDUCE)
    where = route.layout.sharding.devices_indices_map(route.layout.padded)
    order = list(mesh_of(route.layout.sharding).devices.flat)
    before = order[: order.index(route.device)]
    replica = sum(where[device] == where[route.device] for device in before)
    return [Shard(index, route.device, replica, shard_memory.local_of(x))]


def _dtensor(
    array: jax.Array | UnevenArray, device_mesh: DeviceMesh | None, copy: bool | None, name: str
) -> DTensor:
    from torch.distributed.tensor import DTensor

    inner: Any = array
    sizes = None
    if isinstance(array, UnevenArray):
        inner, sizes = array.array, array.sizes
    layout = None
    if not isinstance(inner, Tracer):
        layout = routes.resolved((inner.sharding, array.shape, sizes, routes.mesh_key(device_mesh)))
    if layout is None:
        try:
            question = routes.inbound(array, device_mesh, name)
        except ShardingError as error:
            routes.report_failure(error, device_mesh)
            raise
        routes.resolve(routes.FROM_JAX, [question])
        layout = routes.resolved(question.key)
    else:
        routes.log_exchange(
            routes.FROM_JAX, routes.return_describer(inner, array.shape, device_mesh, name)
        )
    with torch.no_grad():
        return DTensor.from_local(
            shard_memory.local_tensor(inner, layout.local, copy=copy),
            layout.mesh if device_mesh is None else device_mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )


def _questions(
    named: Sequence[tuple[str, Any]], device_mesh: DeviceMesh | None
) -> list[routes.Question]:
    wrong = [f"{name or 'it'} is {type(a).__name__}" for name, a in named if not _is_array(a)]
    if wrong:
        raise TypeError(
            "to_dtensor takes a jax.Array, an UnevenArray, or a container of those: "
            + "; ".join(wrong)
        )
    questions, errors = [], []
    for name, leaf in named:
        try:
            questions.append(routes.inbound(leaf, device_mesh, name))
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return questions


def reduced(x: Leaf) -> Any:
    """Let torch reduce the `Partial` placements of a DTensor; counted in `metrics`.

    Returns:
        A DTensor with `Replicate` in their place; `x` itself if there are none.

    Example:
        >>> reduced(torch.ones(1))
        tensor([1.])
    """
    if not is_dtensor(x) or not any(placement.is_partial() for placement in x.placements):
        return x
    from torch.distributed.tensor import Replicate

    metrics.count("reductions")
    with torch.no_grad():
        return x.redistribute(
            placements=[
                Replicate() if placement.is_partial() else placement for placement in x.placements
            ]
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | UnevenArray)
