"""torch_xla's `Mesh`: devices as a grid with named axes; and the global mesh.

>>> import isoshard.torch_bridge as xs
>>> dict(xs.Mesh(range(8), (4, 2), ("x", "y")).shape())
{'x': 4, 'y': 2}

Unlike torch_xla's, a mesh may be over some of the devices only.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.errors import ShardingError, SpecError
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import SpecLike
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.engine.recording.ambient import set_mode
from isoshard.torch_bridge.layout import marks

from .mark_errors import MarkSpecError, MeshDeviceError, MeshShapeError
from .op_sharding import OpSharding


class Mesh:
    """Devices as a grid with named axes, as torch_xla's `Mesh`.

    Args:
        device_ids: indices in `jax.devices()`, in the order in which they fill the grid (the last
            axis fastest).
        mesh_shape: devices along each axis.
        axis_names: one name per axis; by default the axes are called `"0"`, `"1"`, ..

    Attributes:
        device_ids: as given, flattened.
        mesh_shape: as given.
        axis_names: as given, or None.

    Raises:
        ShardingError: ids, shape and names do not fit each other.
        DeviceError: there are too few devices.

    Example:
        >>> mesh = Mesh(np.arange(8), (4, 2), ("x", "y"))
        >>> mesh.get_logical_mesh()
        array([[0, 1],
               [2, 3],
               [4, 5],
               [6, 7]])
        >>> dict(mesh.shape())
        {'x': 4, 'y': 2}
    """

    def __init__(
        self,
        device_ids: Sequence[int] | np.ndarray | torch.Tensor,
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ):
        """See the class."""
        is_array = isinstance(device_ids, np.ndarray | torch.Tensor)
        ids = device_ids.tolist() if is_array else list(device_ids)
        self.device_ids = np.asarray(ids, dtype=int).reshape(-1)
        self.mesh_shape = tuple(int(extent) for extent in mesh_shape)
        self.axis_names = tuple(axis_names) if axis_names is not None else None
        self._check()
        names = self.axis_names or tuple(str(axis) for axis in range(len(self.mesh_shape)))
        devices = np.array(jax.devices(), object)[self.device_ids].reshape(self.mesh_shape)
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        self._jax_mesh = jax.sharding.Mesh(devices, names, axis_types=auto)
        self._op_shardings: dict[Any, OpSharding] = {}

    def _check(self) -> None:
        ids, size = self.device_ids, int(np.prod(self.mesh_shape))
        wrong = []
        if len(ids) != size:
            wrong.append(f"Number of device IDs ({len(ids)}) must match mesh size ({size})")
        if len(set(ids.tolist())) < len(ids):
            wrong.append(f"Device IDs must be unique, and are {ids.tolist()}")
        names = self.axis_names
        if names is not None and len(names) != len(self.mesh_shape):
            axes = len(self.mesh_shape)
            wrong.append(f"Number of axis names ({len(names)}) must match mesh dimensions ({axes})")
        if names is not None and len(set(names)) < len(names):
            wrong.append(f"Axis names must be unique, and are {names}")
        if wrong:
            raise MeshShapeError(
                f"no mesh of shape {self.mesh_shape} with axis names {names}: {'; '.join(wrong)}. "
                "Give every device once, one extent and one name per axis: "
                "Mesh(range(8), (2, 4), ('x', 'y'))."
            )
        have = len(jax.devices())
        if len(ids) and (ids.max() >= have or ids.min() < 0):
            raise MeshDeviceError(
                f"Device IDs has to be subset of addressable_devices; got: {ids.tolist()}, which "
                f"needs {ids.max() + 1} devices, there are {have} ({jax.default_backend()}). Make "
                "it smaller, or try it on virtual devices: call isoshard.simulate_devices"
                f"({ids.max() + 1}) before anything else."
            )

    @property
    def device_type(self) -> str:
        """Always `"xla"`: what torch's `distribute_tensor` leaves to another library."""
        return "xla"

    def size(self) -> int:
        """The number of devices."""
        return len(self.device_ids)

    def shape(self) -> collections.OrderedDict[str | int, int]:
        """Devices along each axis, by name (or index, if it has no names)."""
        return collections.OrderedDict(
            zip(self.axis_names or range(len(self.mesh_shape)), self.mesh_shape, strict=True)
        )

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as a grid."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The index of the axis with this name, or None."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_jax_mesh(self) -> jax.sharding.Mesh:
        """The same mesh for JAX; axes without a name are called `"0"`, `"1"`, .. .

        Its axes are Auto. If this mesh was made from a `jax.sharding.Mesh`, it is that mesh.
        """
        return self._jax_mesh

    def get_op_sharding(self, partition_spec: SpecLike) -> OpSharding:
        """XLA's description of a spec over this mesh.

        Args:
            partition_spec: one entry per tensor axis, as for `mark_sharding`.

        Raises:
            SpecError: an entry is no axis of the mesh, or an axis is used twice.

        >>> print(Mesh(range(8), (2, 4)).get_op_sharding((1, 0)))
        {devices=[4,2]0,4,1,5,2,6,3,7}
        """
        key = (partition_spec, str(partition_spec))  # (0,) == (False,), and they are two specs
        op_sharding = self._op_shardings.get(key)
        if op_sharding is None:
            try:
                op_sharding = OpSharding.of(self._jax_mesh, partition_spec)
            except SpecError as error:
                raise MarkSpecError(*error.args) from None
            self._op_shardings[key] = op_sharding
            metrics.count("op_shardings")
        return op_sharding

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """Read what `str(mesh)` writes.

        Args:
            mesh_str: the text.

        Returns:
            A mesh like the one that was written; None if the text is no mesh.

        Raises:
            ShardingError, DeviceError: it is a mesh, and not possible with these devices.

        >>> dict(Mesh.from_str(str(Mesh(range(8), (2, 4), ("x", "y")))).shape())
        {'x': 2, 'y': 4}
        """
        try:
            read = ast.literal_eval(mesh_str.strip().removeprefix("Mesh"))
            ids, shape, names = (read[key] for key in ("device_ids", "mesh_shape", "axis_names"))
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None
        return Mesh(ids, shape, names)

    def __str__(self) -> str:
        """As a dictionary, which `from_str` reads."""
        ids = self.device_ids.tolist()
        fields = {"device_ids": ids, "mesh_shape": self.mesh_shape, "axis_names": self.axis_names}
        return str(fields)

    def __repr__(self) -> str:
        """As the constructor."""
        return f"Mesh({self.device_ids.tolist()}, {self.mesh_shape}, {self.axis_names})"


def mesh_from(mesh: MeshLike) -> Mesh:
    """A mesh in any form: an `xs.Mesh`, a `jax.sharding.Mesh`, torch's `DeviceMesh` or ours.

    Args:
        mesh: the mesh; the ranks of a `DeviceMesh` are indices in `jax.devices()`.

    Raises:
        TypeError: it is no mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    convert: Any = getattr(mesh, "get_xs_mesh", None)
    if convert is not None:
        return convert()
    if isinstance(ranks := getattr(mesh, "mesh", None), torch.Tensor):
        names = mesh.mesh_dim_names
        return Mesh(ranks.flatten().tolist(), tuple(ranks.shape), names and tuple(names))
    jax_mesh = as_mesh(mesh)
    ids = [marks.ordinal(device) for device in jax_mesh.devices.flat]
    xs_mesh = Mesh(ids, jax_mesh.axis_sizes, jax_mesh.axis_names)
    xs_mesh._jax_mesh = jax_mesh  # with its axis types
    return xs_mesh


_global: Mesh | None = None
set_mode("global mesh", id(_global))


def set_global_mesh(mesh: Mesh | None) -> None:
    """Set the mesh that functions use by default.

    Args:
        mesh: the mesh; None for none.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> xs.set_global_mesh(xs.Mesh(range(8), (2, 4), ("x", "y")))
        >>> xs.enable_manual_sharding(torch.ones(2, 8, device="jax"), ("x", "y")).shape
        torch.Size([1, 2])
        >>> xs.set_global_mesh(None)
    """
    global _global
    _global = mesh
    set_mode("global mesh", id(mesh))


def get_global_mesh() -> Mesh | None:
    """The mesh set with `set_global_mesh`.

    Returns:
        The mesh; None if none is set.

    Example:
        >>> set_global_mesh(get_1d_mesh("x"))
        >>> get_global_mesh()
        Mesh([0, 1, 2, 3, 4, 5, 6, 7], (8,), ('x',))
        >>> set_global_mesh(None)
    """
    return _global


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh of all devices along one axis.

    Args:
        axis_name: the name of the axis.

    Returns:
        The mesh.

    Example:
        >>> dict(get_1d_mesh("data").shape())
        {'data': 8}
    """
    count = len(jax.devices())
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def default_mesh(mesh: MeshLike = None) -> Mesh:
    """The mesh that is passed, else the global mesh.

    Raises:
        ShardingError: there is neither.
    """
    if mesh is not None:
        return mesh_from(mesh)
    if _global is None:
        raise ShardingError(
            "no mesh is passed and no global mesh is set; pass mesh=.., or call "
            "xs.set_global_mesh(mesh) first"
        )
    return _global
