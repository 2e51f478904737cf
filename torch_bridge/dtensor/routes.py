"""Routes: how DTensors of one mesh, shape, dtype and placements lie in JAX, agreed on once.

A route is worked out once and kept. Before it is kept, the ranks of the mesh tell one another what
they are about to exchange, so that a rank which means another shape or layout is an error in all
of them and not a program that waits for ever.
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
    """Where the shards of DTensors with one mesh, shape and placements lie in JAX.

    Attributes:
        layout: of the array.
        block: shape of the shard on each device.
        local: shape of this rank's local tensor.
        offset: where in the whole tensor it starts.
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
                f"placements has {self.local} there. Cut it as torch.chunk does, and give "
                "DTensor.from_local the shape= and stride= of the whole."
            )


@dataclasses.dataclass(frozen=True)
class Return:
    """What a DTensor over an array's shards is called in torch.

    Attributes:
        mesh: the DeviceMesh.
        placements: one per mesh axis.
        shape: of the whole tensor.
        stride: of the whole tensor.
        local: shape of the valid part of this rank's shard; None: all of it.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Question:
    """Something to work out and to agree on.

    Attributes:
        key: under which the answer is kept.
        said: what this rank means, in words.
        ranks: who has to mean the same.
        find: works it out, or raises.
    """

    key: Any
    said: str
    ranks: tuple[int, ...]
    find: Callable[[], Any]


_kept: dict[Any, Any] = {}
_keys: dict[tuple[int, ...], Bounded[Any, bool]] = {}
_KEPT = 8192
TO_JAX, FROM_JAX = "an exchange from torch to JAX", "an exchange from JAX to torch"


def _keep(key: Any, ranks: tuple[int, ...], answer: Any) -> None:
    """Keep an answer. The ranks that agreed on it have the same ones, and forget the same."""
    new = Bounded[Any, bool](_KEPT, "dtensor: what processes agreed on", agreed=True)
    keys = _keys.setdefault(ranks, new)
    if len(keys) == _KEPT:
        _kept.pop(next(iter(keys)), None)
    keys[key] = True
    _kept[key] = answer


def known(key: Opaque) -> Any:
    """The answer to a question that was settled, or None."""
    return _kept.get(key)


def again(subject: str, said: Callable[[], str]) -> None:
    """Say that an exchange is made whose answer is known.

    Args:
        subject: `TO_JAX` or `FROM_JAX`.
        said: what it is of, in words; kept, so it must not keep memory.

    Raises:
        DistributedError: others have waited for this rank at an earlier exchange.
    """
    log_call(subject, said)


def settle(subject: str, questions: Sequence[Question]) -> None:
    """Work out what is not known yet, agree on it, then raise what is wrong or keep it.

    Args:
        subject: `TO_JAX` or `FROM_JAX`.
        questions: in the same order in every rank.

    Raises:
        ShardingError: the faults of all of them.
        DistributedError: the ranks mean different things.
    """
    found: dict[Any, Any] = {}
    faults: list[Exception] = []
    groups: dict[tuple[int, ...], list[str]] = {}
    for question in questions:
        if question.key in _kept or question.key in found:
            continue
        said = question.said
        try:
            found[question.key] = question.find()
        except Exception as error:  # raised when the others know of it
            faults.append(error)
            said += f", but {error}"
        groups.setdefault(question.ranks, []).append(said)
    shared = [ranks for ranks in groups if len(ranks) > 1 and jax.process_index() in ranks]
    for ranks in shared:
        assert_equal(subject, groups[ranks], ranks=ranks)
    if not shared:
        again(subject, partial("; ".join, [question.said for question in questions]))
    for fault in faults:
        if not isinstance(fault, ShardingError):
            raise fault
    raise_collected([fault for fault in faults if isinstance(fault, ShardingError)])
    for question in questions:
        if question.key in found:
            _keep(question.key, question.ranks, found.pop(question.key))


def tell(error: Exception, device_mesh: DeviceMesh | None) -> None:
    """Tell the ranks of a mesh, or all, that this one has nothing to give to torch: it has failed.

    Args:
        error: which the caller raises.
        device_mesh: whose ranks are told.
    """
    if jax.process_count() > 1:
        ranks = None if device_mesh is None else device_mesh.mesh.flatten().tolist()
        report_error(FROM_JAX, error, ranks)


def route_of(mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> Route:
    """Work out how a DTensor lies in JAX; asks nobody.

    Args:
        mesh: of the DTensor.
        placements: one per mesh axis.
        shape: of the whole tensor.

    Returns:
        The route.

    Raises:
        UnrepresentableError: JAX has no words for the placements.
    """
    layout = translation.layout_of(placements, mesh, shape)
    if mesh.device_type == "xla":
        raise UnrepresentableError(
            f"{mesh} has no ranks that hold local tensors, as torch gives meshes of type 'xla' "
            "none: take one of type 'cpu' or 'cuda', torch.distributed.init_device_mesh('cpu', ..)"
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
    """What this rank holds of a tensor that all ranks of a mesh hold together.

    Attributes:
        name: of the tensor, for messages.
        local: this rank's part.
        mesh: the ranks.
        placements: one per mesh axis.
        shape: of the whole tensor.
    """

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size

    @classmethod
    def of(cls, x: DTensor, name: str) -> RankShard:
        """What a DTensor says of itself."""
        return cls(name, local_of(x, name), x.device_mesh, x.placements, x.shape)

    @property
    def key(self) -> Any:
        """Under which its route is kept."""
        return self.mesh, self.placements, self.shape, self.local.dtype

    def words(self) -> Callable[[], str]:
        """What says which exchange that is; does not keep the tensor."""
        name, shape, dtype = self.name, tuple(self.shape), self.local.dtype
        placements, mesh = self.placements, self.mesh
        return lambda: f"{name}: {shape} of {dtype} by {placements} on {_said(mesh)}"

    def route(self) -> Route:
        """How it lies in JAX; a ShardingError if that cannot be, or the local part is wrong."""
        route = route_of(self.mesh, self.placements, self.shape)
        if route.device is not None:
            route.check(self.local, self.name)
        return route


def outbound(held: RankShard) -> Question:
    """How does this tensor lie in JAX? The answer is a `Route`.

    Args:
        held: this rank's part.

    Returns:
        The question.
    """
    ranks = tuple(held.mesh.mesh.flatten().tolist())
    return Question(held.key, held.words()(), ranks, held.route)


def inbound(array: jax.Array | UnevenArray, device_mesh: DeviceMesh | None, name: str) -> Question:
    """What is a DTensor over this array's shards called? The answer is a `Return`.

    Args:
        array: with one device per process.
        device_mesh: of the DTensor, or None for that of the array.
        name: of the array, for messages.

    Returns:
        The question.

    Raises:
        ShardingError: the array has no mesh of one device per process.
    """
    inner: Any = array
    sizes = None
    if isinstance(array, UnevenArray):
        inner, sizes = array.array, array.sizes
    shape = tuple(array.shape)
    sharding = _sharding(inner, name)

    def find() -> Return:
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
                f"{name}: its blocks hold {sizes or 'equal parts'}, and DTensor with {placements} "
                f"has {chunked or 'equal parts'}, as torch.chunk cuts. Give it blocks that DTensor "
                "has, or lay it out anew: iso.reshard(x, spec)."
            )
        local = None if sizes is None or back.device is None else back.local
        return Return(mesh, tuple(placements), torch.Size(shape), strides_of(shape), local)

    said = coming_back(inner, shape, device_mesh, name)()
    ranks = tuple(sorted({device.process_index for device in sharding.device_set}))
    return Question((sharding, shape, sizes, place(device_mesh)), said, ranks, find)


def coming_back(
    array: jax.Array, shape: Sequence[int], device_mesh: DeviceMesh | None, name: str
) -> Callable[[], str]:
    """What says which exchange that is; does not keep the array.

    Args:
        array: with one device per process.
        shape: of the whole.
        device_mesh: as for `inbound`.
        name: likewise.
    """
    dtype, sharding = array.dtype, array.sharding
    return lambda: f"{name}: {tuple(shape)} of {dtype} by {sharding} to {_said(device_mesh)}"


def place(device_mesh: DeviceMesh | None) -> Any:
    """What stands for a DeviceMesh in a key; for None torch's process group, whose mesh is taken.

    Args:
        device_mesh: that the caller gave.

    Returns:
        Something hashable.
    """
    return torch.distributed.group.WORLD if device_mesh is None else device_mesh


def _sharding(array: Any, name: str) -> NamedSharding:
    if isinstance(array, Tracer):
        raise ShardingError(
            f"{name}: a traced value has no shards; call to_dtensor outside jit, grad and vmap"
        )
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            f"{name}: an array by {sharding} lies on no mesh of processes; lay it out first: "
            "iso.shard(x, mesh, spec)"
        )
    if len(sharding.addressable_devices) > 1:
        raise ShardingError(
            f"{name}: this process drives {len(sharding.addressable_devices)} devices of the "
            "array's mesh, and a DTensor has one per process. Here iso.to_torch(array) gives a "
            "tensor on the jax device; for DTensors start one process per device, as torchrun does."
        )
    return sharding


def _said(mesh: DeviceMesh | None) -> str:
    if mesh is None:
        return "its own mesh"
    names = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"the mesh {mesh.mesh.tolist()}{names}"
