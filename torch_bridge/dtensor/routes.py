"""Routes: the shardings in JAX of DTensors by mesh, shape, dtype and placements, agreed on once.

A route is computed once and cached. Before that, the ranks of the mesh compare what they are about
to exchange, so that another shape or layout in one rank is an error in all of them, and not a
program that hangs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import NamedSharding

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import ShardingError, UnrepresentableError, raise_collected
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.processes.agreement import assert_equal, log_call, report_error
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import Bounded
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.placements import translation

from .shard_memory import local_of, strides_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class Route:
    """The sharding in JAX of DTensors with one mesh, shape and placements.

    Attributes:
        layout: of the array.
        block: shape of the shard on each device.
        local: shape of this rank's local tensor.
        offset: of the local tensor in the global one.
        device: this process's device; None in a rank outside the mesh.
    """

    layout: BlockLayout
    block: tuple[int, ...]
    local: tuple[int, ...]
    offset: tuple[int, ...]
    device: Any

    def check(self, local: torch.Tensor, name: str) -> None:
        """Raise ShardingError unless a local tensor has the shape that the placements give it."""
        if tuple(local.shape) != self.local:
            raise ShardingError(
                f"{name}: the local tensor of rank {jax.process_index()} has shape "
                f"{tuple(local.shape)}, where a tensor of shape {self.layout.shape} with these "
                f"placements has {self.local} there. Split it as torch.chunk does, and pass "
                "DTensor.from_local the shape= and stride= of the global tensor."
            )


@dataclasses.dataclass(frozen=True)
class DTensorLayout:
    """Mesh and placements in torch of a DTensor over an array's shards.

    Attributes:
        mesh: the DeviceMesh.
        placements: one per mesh axis.
        shape: of the global tensor.
        stride: of the global tensor.
        local: shape of this rank's shard without padding; None: it has none.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Question:
    """A layout to compute and to agree on.

    Attributes:
        key: of the layout in the cache.
        description: of the exchange, compared between the ranks.
        ranks: that make the same exchange.
        find: computes the layout, or raises.
    """

    key: Any
    description: str
    ranks: tuple[int, ...]
    find: Callable[[], Any]


_resolved: dict[Any, Any] = {}
_keys: dict[tuple[int, ...], Bounded[Any, bool]] = {}
_MAX_RESOLVED = 8192
TO_JAX, FROM_JAX = "an exchange from torch to JAX", "an exchange from JAX to torch"


def _store(key: Any, ranks: tuple[int, ...], layout: Any) -> None:
    """Cache a layout. The ranks that agreed on it cache, and evict, the same ones."""
    new = Bounded[Any, bool](_MAX_RESOLVED, "dtensor: what processes agreed on", agreed=True)
    keys = _keys.setdefault(ranks, new)
    if len(keys) == _MAX_RESOLVED:
        _resolved.pop(next(iter(keys)), None)
    keys[key] = True
    _resolved[key] = layout


def resolved(key: Opaque) -> Any:
    """The layout that ranks have agreed on, or None."""
    return _resolved.get(key)


def log_exchange(subject: str, description: Callable[[], str]) -> None:
    """Log an exchange whose layout is cached.

    Args:
        subject: `TO_JAX` or `FROM_JAX`.
        description: gives a text; the log keeps it, so it must not refer to tensors.

    Raises:
        DistributedError: other ranks have waited for this one at an earlier exchange.
    """
    log_call(subject, description)


def resolve(subject: str, questions: Sequence[Question]) -> None:
    """Compute the layouts that are not cached, agree on them, then raise errors or cache them.

    Args:
        subject: `TO_JAX` or `FROM_JAX`.
        questions: in the same order in every rank.

    Raises:
        ShardingError: the errors of all of them.
        DistributedError: the ranks exchange different tensors.
    """
    layouts: dict[Any, Any] = {}
    errors: list[Exception] = []
    groups: dict[tuple[int, ...], list[str]] = {}
    for question in questions:
        if question.key in _resolved or question.key in layouts:
            continue
        description = question.description
        try:
            layouts[question.key] = question.find()
        except Exception as exception:  # raised below, after the other ranks have it
            errors.append(exception)
            description += f", but {exception}"
        groups.setdefault(question.ranks, []).append(description)
    shared = [ranks for ranks in groups if len(ranks) > 1 and jax.process_index() in ranks]
    for ranks in shared:
        assert_equal(subject, groups[ranks], ranks=ranks)
    if not shared:
        log_exchange(subject, partial("; ".join, [question.description for question in questions]))
    for error in errors:
        if not isinstance(error, ShardingError):
            raise error
    raise_collected([error for error in errors if isinstance(error, ShardingError)])
    for question in questions:
        if question.key in layouts:
            _store(question.key, question.ranks, layouts.pop(question.key))


def report_failure(error: Exception, device_mesh: DeviceMesh | None) -> None:
    """Report to the ranks of a mesh, or to all, that this one has failed to convert to torch.

    Args:
        error: which the caller raises.
        device_mesh: of the ranks; None for all.
    """
    if jax.process_count() > 1:
        ranks = None if device_mesh is None else device_mesh.mesh.flatten().tolist()
        report_error(FROM_JAX, error, ranks)


def route_of(mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> Route:
    """Compute the sharding of a DTensor in JAX; communicates nothing.

    Args:
        mesh: of the DTensor.
        placements: one per mesh axis.
        shape: of the global tensor.

    Raises:
        UnrepresentableError: no PartitionSpec expresses the placements.
    """
    layout = translation.layout_of(placements, mesh, shape)
    if mesh.device_type == "xla":
        raise UnrepresentableError(
            f"{mesh} has no ranks with local tensors, as torch gives meshes of type 'xla' none: "
            "use one of type 'cpu' or 'cuda', torch.distributed.init_device_mesh('cpu', ..)"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Route(layout, layout.block, (0,), (0,), None)
    local, offset = translation.local_shape_and_offset(
        layout.shape, tuple(mesh.shape), placements, coordinate
    )
    (device,) = layout.sharding.addressable_devices
    return Route(layout, layout.block, local, offset, device)


@dataclasses.dataclass(frozen=True, eq=False)
class RankShard:
    """This rank's shard of a tensor over a mesh of ranks.

    Attributes:
        name: of the tensor, for messages.
        local: the shard.
        mesh: the ranks.
        placements: one per mesh axis.
        shape: of the global tensor.
    """

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size

    @classmethod
    def of(cls, x: DTensor, name: str) -> RankShard:
        """The shard of a DTensor."""
        return cls(name, local_of(x, name), x.device_mesh, x.placements, x.shape)

    @property
    def key(self) -> Any:
        """The key of its route in the cache."""
        return self.mesh, self.placements, self.shape, self.local.dtype

    def describer(self) -> Callable[[], str]:
        """A function that describes the exchange, without a reference to the tensor."""
        name, shape, dtype = self.name, tuple(self.shape), self.local.dtype
        placements, mesh = self.placements, self.mesh
        return lambda: f"{name}: {shape} of {dtype} by {placements} on {_describe_mesh(mesh)}"

    def route(self) -> Route:
        """Its sharding in JAX; raises ShardingError if there is none, or the shape is wrong."""
        route = route_of(self.mesh, self.placements, self.shape)
        if route.device is not None:
            route.check(self.local, self.name)
        return route


def outbound(shard: RankShard) -> Question:
    """The question for the `Route` of a tensor."""
    ranks = tuple(shard.mesh.mesh.flatten().tolist())
    return Question(shard.key, shard.describer()(), ranks, shard.route)


def inbound(array: jax.Array | UnevenArray, device_mesh: DeviceMesh | None, name: str) -> Question:
    """The question for the `DTensorLayout` of an array.

    Args:
        array: with one device per process.
        device_mesh: of the DTensor, or None for that of the array.
        name: of the array, for messages.

    Raises:
        ShardingError: the array has no mesh of one device per process.
    """
    inner: Any = array
    sizes = None
    if isinstance(array, UnevenArray):
        inner, sizes = array.array, array.sizes
    shape = tuple(array.shape)
    sharding = _sharding(inner, name)

    def find() -> DTensorLayout:
        if device_mesh is None:
            mesh = translation.rank_mesh_of(mesh_of(sharding))
            placements = translation.placements_of(sharding)
        else:
            mesh = device_mesh
            placements = translation.placements_on(sharding, mesh, len(shape))
        back = route_of(mesh, placements, shape)
        chunked = None if back.layout.is_even else back.layout.sizes
        if chunked != sizes:
            raise UnrepresentableError(
                f"{name}: its blocks have {sizes or 'equal sizes'}, and those of a DTensor with "
                f"{placements} {chunked or 'equal sizes'}, as torch.chunk splits. Use those, or "
                "reshard it: iso.reshard(x, spec)."
            )
        local = None if sizes is None or back.device is None else back.local
        return DTensorLayout(mesh, tuple(placements), torch.Size(shape), strides_of(shape), local)

    description = return_describer(inner, shape, device_mesh, name)()
    ranks = tuple(sorted({device.process_index for device in sharding.device_set}))
    return Question((sharding, shape, sizes, mesh_key(device_mesh)), description, ranks, find)


def return_describer(
    array: jax.Array, shape: Sequence[int], device_mesh: DeviceMesh | None, name: str
) -> Callable[[], str]:
    """A function that describes the exchange, without a reference to the array.

    Args:
        array: with one device per process.
        shape: without padding.
        device_mesh: as for `inbound`.
        name: likewise.
    """
    dtype, sharding = array.dtype, array.sharding
    return lambda: (
        f"{name}: {tuple(shape)} of {dtype} by {sharding} to {_describe_mesh(device_mesh)}"
    )


def mesh_key(device_mesh: DeviceMesh | None) -> Any:
    """A DeviceMesh as a part of keys; for None torch's process group, which gives the mesh."""
    return torch.distributed.group.WORLD if device_mesh is None else device_mesh


def _sharding(array: Any, name: str) -> NamedSharding:
    if isinstance(array, Tracer):
        raise ShardingError(
            f"{name}: a traced value has no shards; call to_dtensor outside jit, grad and vmap"
        )
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            f"{name}: an array with {sharding} is on no mesh of processes; shard it first: "
            "iso.shard(x, mesh, spec)"
        )
    if len(sharding.addressable_devices) > 1:
        raise ShardingError(
            f"{name}: this process drives {len(sharding.addressable_devices)} devices of the "
            "array's mesh, and a DTensor has one per process. Here iso.to_torch(array) gives a "
            "tensor on the jax device; for DTensors start one process per device, as torchrun does."
        )
    return sharding


def _describe_mesh(mesh: DeviceMesh | None) -> str:
    if mesh is None:
        return "its own mesh"
    names = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"the mesh {mesh.mesh.tolist()}{names}"
