"""A mesh over several slices of devices: some axes over the slow network, others within a slice."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax

from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.layout.mesh import hybrid_mesh
from isoshard.core.runtime._jax_internals import meshes
from isoshard.torch_bridge.layout import marks

from .mesh import Mesh


class HybridMesh(Mesh):
    """A mesh whose axes are split over slices first, and over the devices of a slice then.

    Devices without slices (CPUs, the GPUs of one host) are divided in order into equal groups,
    which stand for slices; torch_xla raises for those. Where
    `torch_xla.runtime.global_runtime_device_attributes` reports slices that the devices do not
    have, as in a test that replaces it, the mesh is that of the chips it reports.

    Args:
        ici_mesh_shape: devices along each axis within one slice (the fast interconnect).
        dcn_mesh_shape: slices along each axis (the data centre network); one slice if not given.
        axis_names: one name per axis; by default the axes are called `"0"`, `"1"`, ..

    Attributes:
        ici_mesh_shape: as given.
        dcn_mesh_shape: as given; 1 for each axis by default.

    Raises:
        ShardingError: a `ValueError`; the shapes and names do not belong together, or their
            products are not the numbers of slices and of devices.

    Example:
        >>> mesh = HybridMesh(
        ...     ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1), axis_names=("data", "model")
        ... )
        >>> dict(mesh.shape())
        {'data': 2, 'model': 4}
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]

    def __init__(
        self,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
    ):
        """See the class."""
        ici = tuple(map(int, ici_mesh_shape))
        dcn = (1,) * len(ici) if dcn_mesh_shape is None else tuple(map(int, dcn_mesh_shape))
        names = tuple(map(str, range(len(ici)))) if axis_names is None else tuple(axis_names)
        chips = _runtime_chips()
        _check_slices(dcn, chips)
        if chips:
            grid = meshes.HYBRID_MESH.resolve()(ici, dcn, chips)
        else:
            try:
                grid = hybrid_mesh(ici, dcn, names).devices
            except DeviceError as error:
                raise ShardingError(str(error)) from None
        self.ici_mesh_shape = ici
        self.dcn_mesh_shape = dcn
        ids = [device.id if chips else marks.ordinal(device) for device in grid.flat]
        super().__init__(ids, grid.shape, None if axis_names is None else names)


def _runtime_chips() -> list[Any]:
    """The chips in slices that the script's runtime reports, where the devices have no slices."""
    runtime: Any = sys.modules.get("isoshard.torch_xla_bridge.torch_xla.runtime")
    if runtime is None or len(_slices(jax.devices())) > 1:
        return []
    kind = {"platform": "tpu", "device_kind": "", "process_index": 0, "slice_index": None}
    chips = [
        SimpleNamespace(**{**kind, **chip, "id": int(chip["name"].rpartition(":")[2])})
        for chip in runtime.global_runtime_device_attributes()
    ]
    return chips if len(_slices(chips)) > 1 else []


def _slices(devices: Sequence[Any]) -> set[Any]:
    return {getattr(device, "slice_index", None) for device in devices}


def _check_slices(dcn: tuple[int, ...], chips: Sequence[Any]) -> None:
    """Raise ShardingError unless the requested slices are as many as those of the devices."""
    slices = _slices(chips or jax.devices())
    if len(slices) > 1 and math.prod(dcn) != len(slices):
        raise ShardingError(
            f"the devices are in {len(slices)} slices, and dcn_mesh_shape {dcn} arranges "
            f"{math.prod(dcn)}; give the slices along each axis, with the product {len(slices)}"
        )
