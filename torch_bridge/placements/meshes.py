"""Torch's meshes and JAX's: the same devices under the same names.

The rank `r` of a torch mesh is the one device of JAX's process `r`; where one process drives all
devices, it is `jax.devices()[r]`.

>>> import torch
>>> from torch.distributed.device_mesh import DeviceMesh
>>> mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("row", "column"))
>>> jax_mesh(mesh).axis_names, jax_mesh(mesh).axis_sizes
(('row', 'column'), (2, 4))
>>> device_mesh_of(jax_mesh(mesh)) == mesh
True

Among several processes ranks ascend along each dimension of a mesh. Of one where they do not, as
`[[3, 0], [2, 1]]`, torch contradicts itself: a rank's coordinate is its index in the mesh, but its
collectives put parts together by ascending rank, so `full_tensor()` is no inverse of
`distribute_tensor`. No sharding in JAX is both, and such meshes are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from isoshard.core.errors import DeviceError, UnrepresentableError
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.runtime.caches import Bounded, cached
from isoshard.torch_bridge.common.argument_types import MeshLike


@cached(256)
def jax_mesh(device_mesh: MeshLike) -> Mesh:
    """The mesh of the same devices for JAX, its axes Auto; one of JAX's own is returned as it is.

    Args:
        device_mesh: a torch `DeviceMesh`, or a mesh in any form that `iso.as_mesh` takes.

    Returns:
        The mesh; axes without a name are called `"0"`, `"1"`, ..

    Raises:
        DeviceError: there is no device for a rank, or a process has several.
        UnrepresentableError: ranks of several processes do not ascend along a dimension.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> dict(jax_mesh(DeviceMesh("xla", torch.arange(8).reshape(4, 2))).shape)
        {'0': 4, '1': 2}
    """
    if isinstance(device_mesh, Mesh) or hasattr(device_mesh, "get_jax_mesh"):
        return as_mesh(device_mesh)
    ranks = device_mesh.mesh.numpy()
    devices = _devices_by_rank()
    if missing := [rank for rank in ranks.ravel().tolist() if rank >= len(devices)]:
        raise DeviceError(
            f"the mesh {device_mesh} has ranks {missing}, and JAX has {len(devices)} devices in "
            f"{jax.process_count()} processes. Call iso.distributed.init_distributed() first, in "
            f"every process; or in one process iso.simulate_devices({max(missing) + 1}), before "
            "anything else."
        )
    names = device_mesh.mesh_dim_names or tuple(map(str, range(ranks.ndim)))
    _check_ascending(ranks, names)
    grid = np.array(devices, object)[ranks]
    mesh = Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * ranks.ndim)
    _remember(mesh, device_mesh)
    return mesh


def device_mesh_of(mesh: Mesh, device_type: str | None = None) -> Any:
    """The torch `DeviceMesh` of the same devices. Cached.

    One that `jax_mesh` has seen is returned as it was. A new one among several processes starts
    process groups: every process of torch's must then make the same meshes in the same order, also
    those it is no part of.

    Args:
        mesh: the mesh, of all processes or some.
        device_type: torch's name of the devices; by default the one that fits JAX's, and `"xla"`
            where one process drives them all.

    Returns:
        The mesh; its axes have names unless they are `"0"`, `"1"`, ..

    Raises:
        DeviceError: torch's process group is not there, or a process has several devices.
        UnrepresentableError: they are of ranks that do not ascend along an axis.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> device_mesh_of(make_mesh((2, 4), ("row", "column")))
        DeviceMesh((row=2, column=4), 'xla', stride=(4, 1))
    """
    mesh = of_type(mesh, AxisType.Auto)
    world = _world()
    cached = _device_meshes.get((mesh, device_type))
    if cached is not None and cached[1] is world:
        return cached[0]
    device_mesh = _new_device_mesh(mesh, device_type)
    _remember(mesh, device_mesh)
    return device_mesh


def rank_mesh_of(mesh: Mesh) -> Any:
    """The torch `DeviceMesh` of the same devices, each of which is a rank of torch's process group.

    It is that of `device_mesh_of`, but where the only process is the only rank: there it is of the
    type of that device, as DTensors have no local tensor on one of `"xla"`.

    Raises:
        DeviceError: torch's process group is not there, or is of other devices.
    """
    if jax.process_count() > 1:
        return device_mesh_of(mesh)
    import torch.distributed as dist

    if _world() is None:
        raise DeviceError(
            "a DTensor needs torch's process group, and there is none: call "
            "iso.distributed.init_distributed() first"
        )
    ranks, (device,) = dist.get_world_size(), mesh.devices.flat
    if ranks > 1:
        raise DeviceError(
            f"torch's process group has {ranks} ranks, and JAX has one process: call "
            "iso.distributed.init_distributed() first, in every process"
        )
    if device != jax.devices()[0]:
        raise DeviceError(
            f"the array is on {device}, and the only rank of torch's process group is "
            f"{jax.devices()[0]}: shard it there, iso.shard(x, mesh, spec)"
        )
    return device_mesh_of(mesh, _device_type(mesh))


@cached(512)
def of_type(mesh: Mesh, kind: AxisType) -> Mesh:
    """The same mesh with all axes of one type."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


_device_meshes: Bounded[tuple[Mesh, str | None], tuple[Any, Any]] = Bounded(
    512, "dtensor: device meshes", agreed=True
)


def _remember(mesh: Mesh, device_mesh: Any) -> None:
    entry = (device_mesh, _world())
    for stale in [key for key, (_, world) in _device_meshes.items() if world is not entry[1]]:
        del _device_meshes[stale]
    _device_meshes[mesh, device_mesh.device_type] = entry
    cached = _device_meshes.get((mesh, None))
    if cached is None or cached[1] is not entry[1]:
        _device_meshes[mesh, None] = entry


def _world() -> Any:
    """Torch's process group of all, or None: meshes made under another are stale."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() else None


def _new_device_mesh(mesh: Mesh, device_type: str | None) -> Any:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    rank = {device: at for at, device in enumerate(_devices_by_rank())}
    ranks = torch.tensor([rank[d] for d in mesh.devices.flat]).reshape(mesh.devices.shape)
    plain = mesh.axis_names == tuple(map(str, range(len(mesh.axis_names))))
    names = None if plain else tuple(map(str, mesh.axis_names))
    if jax.process_count() == 1:
        device_type = device_type or "xla"
    elif _world() is None:
        raise DeviceError(
            "a DeviceMesh over several processes needs torch's process group, and there is none: "
            "call iso.distributed.init_distributed() first, in every process"
        )
    _check_ascending(ranks.numpy(), mesh.axis_names)
    return DeviceMesh(device_type or _device_type(mesh), ranks, mesh_dim_names=names)


def _check_ascending(ranks: np.ndarray, names: Sequence[str]) -> None:
    """Raise for a mesh of processes whose ranks torch orders in two ways; see the module."""
    if jax.process_count() == 1:
        return
    for axis, name in enumerate(names):
        lines = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
        wrong = [line.tolist() for line in lines if (np.diff(line) < 0).any()]
        if wrong:
            ascending = ranks
            for each in range(ranks.ndim):
                ascending = np.sort(ascending, axis=each)
            raise UnrepresentableError(
                f"the mesh {ranks.tolist()} has the ranks {wrong[0]} along its dimension {name!r}, "
                "which do not ascend: torch's DTensor splits by the index in the mesh and gathers "
                "by ascending rank, so shards would be permuted. Make the mesh of ranks that "
                f"ascend along each dimension, as {ascending.tolist()}"
            )


def _device_type(mesh: Mesh) -> str:
    """Torch's name of the devices."""
    return {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(mesh.devices.flat[0].platform, "xla")


def _devices_by_rank() -> list[Any]:
    """The device of each rank: of each process, or all those of the only process."""
    devices = jax.devices()
    if jax.process_count() == 1:
        return devices
    owners = [device.process_index for device in devices]
    if several := sorted({owner for owner in owners if owners.count(owner) > 1}):
        raise DeviceError(
            f"processes {several} have several JAX devices, and a rank of torch is one device: "
            "start one process per device, and give each one only "
            "(iso.distributed.init_distributed() does)"
        )
    return [device for _, device in sorted(zip(owners, devices, strict=True), key=lambda p: p[0])]
