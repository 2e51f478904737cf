"""A mesh over several slices of devices, so that axes over the slow network are known."""

from __future__ import annotations

import math

import jax

from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.mesh import hybrid_mesh
from isoshard.torch_bridge.layout import marks

from .mesh import Mesh


class HybridMesh(Mesh):
    """A mesh whose axes are split over slices first, and over the devices of a slice then.

    Devices that know no slices (CPUs, the GPUs of one host) are divided in order into equal groups,
    which stand for them; torch_xla refuses those.

    Args:
        ici_mesh_shape: devices along each axis within one slice (the fast interconnect).
        dcn_mesh_shape: slices along each axis (the data centre network); one slice if not given.
        axis_names: one name per axis; by default the axes are called `"0"`, `"1"`, ..

    Attributes:
        ici_mesh_shape: as given.
        dcn_mesh_shape: as given, or all ones.

    Raises:
        ShardingError: a `ValueError`; the shapes and names do not belong together, or their
            products are not the numbers of slices and of devices.

    >>> mesh = HybridMesh(
    ...     ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1), axis_names=("data", "model")
    ... )
    >>> mesh.shape()
    OrderedDict([('data', 2), ('model', 4)])
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
        _check_slices(dcn)
        try:
            grid = hybrid_mesh(ici, dcn, names).devices
        except DeviceError as error:
            raise ShardingError(str(error)) from None
        self.ici_mesh_shape = ici
        self.dcn_mesh_shape = dcn
        ids = [marks.ordinal(device) for device in grid.flat]
        super().__init__(ids, grid.shape, None if axis_names is None else names)


def _check_slices(dcn: tuple[int, ...]) -> None:
    """Compare the slices asked for with those that devices tell of."""
    slices = {getattr(device, "slice_index", None) for device in jax.devices()}
    if len(slices) > 1 and math.prod(dcn) != len(slices):
        raise ShardingError(
            f"the devices are in {len(slices)} slices, and dcn_mesh_shape {dcn} arranges "
            f"{math.prod(dcn)}; give the slices along each axis, with the product {len(slices)}"
        )
