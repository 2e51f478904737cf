"""Meshes of JAX and of torch_xla: the same grid of device numbers.

torch_xla's device `i` is `jax.devices()[i]`. A mesh of torch_xla takes every device there is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from isoshard.core.kit import Device, DeviceError, as_mesh, cached, make_mesh

from .real import load


def mesh_to_torch_xla(mesh: Mesh) -> Any:
    """The mesh of torch_xla with the same devices, shape and names.

    Args:
        mesh: a `jax.sharding.Mesh` of all devices, in any order.

    Returns:
        A `torch_xla.distributed.spmd.Mesh`; equal meshes give one object.

    Raises:
        ImportError: torch_xla is not installed.
        DeviceError: the mesh does not have the devices that torch_xla has.
    """
    return _to_torch_xla(as_mesh(mesh))


def mesh_from_torch_xla(mesh: Any) -> Mesh:
    """The mesh of JAX with the same devices, shape and names.

    Args:
        mesh: a `torch_xla.distributed.spmd.Mesh`; axes without names are called `"0"`, `"1"`, ..

    Returns:
        A `jax.sharding.Mesh` with Auto axes.

    Raises:
        DeviceError: JAX has fewer devices.
    """
    shape = tuple(int(extent) for extent in mesh.mesh_shape)
    names = mesh.axis_names or tuple(str(axis) for axis in range(len(shape)))
    ids = [int(id_) for id_ in mesh.device_ids]
    return make_mesh(shape, names, devices=[device_by_id(id_) for id_ in ids])


def any_mesh(mesh: Any) -> Mesh:
    """The mesh of JAX, from one of torch_xla or any other that core takes."""
    if isinstance(mesh, load("torch_xla.distributed.spmd").Mesh):
        return mesh_from_torch_xla(mesh)
    return as_mesh(mesh)


def device_ids(mesh: Mesh) -> list[int]:
    """torch_xla's number of each device of a mesh, in mesh order."""
    index_of = {device: index for index, device in enumerate(jax.devices())}
    return [index_of.get(device, -1) for device in mesh.devices.flat]


def device_by_id(device_id: int) -> Device:
    """JAX's device that is torch_xla's `device_id`."""
    devices = jax.devices()
    if device_id >= len(devices):
        raise DeviceError(
            f"torch_xla's device {device_id} has no counterpart: JAX has {len(devices)} devices "
            f"({jax.default_backend()}), torch_xla has {_count()}. Give JAX as many: call "
            f"isoshard.simulate_devices({_count()}) before anything else."
        )
    return devices[device_id]


@cached(64)
def _to_torch_xla(mesh: Mesh) -> Any:
    ids, count = device_ids(mesh), _count()
    if sorted(ids) != list(range(count)):
        raise DeviceError(
            f"a mesh of torch_xla takes all of its {count} devices, and this one has {mesh.size}: "
            f"{list(mesh.devices.flat)}. Make it of all devices, and start torch_xla with as many "
            f"as JAX has ({len(jax.devices())}): CPU_NUM_DEVICES={len(jax.devices())}."
        )
    return load("torch_xla.distributed.spmd").Mesh(ids, mesh.devices.shape, mesh.axis_names)


def _count() -> int:
    return load("torch_xla.runtime").global_runtime_device_count()
