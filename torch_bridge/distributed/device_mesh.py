"""torch's `DeviceMesh` for one process that drives all devices: no process group, no ranks.

>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> mesh
DeviceMesh((dp=2, tp=4), 'jax')
>>> mesh["tp"]
DeviceMesh((tp=4), 'jax', of (dp=2, tp=4))

Under torchrun `mesh["tp"]` is, in every process, the row of that process. Here it is all rows at
once: it keeps the mesh it was sliced from, and a tensor that is split over `tp` alone is replicated
over `dp`. So a layout over a submesh is a layout over its root, and `get_jax_mesh()` of both is one
mesh. `mesh.mesh` of a submesh is its first row.

Queries of the current process's rank raise (`get_rank`, `get_local_rank`, `get_coordinate`,
`get_group`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.errors import ShardingError
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike, Opaque
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.spmd.mesh import Mesh, get_global_mesh, mesh_from

from .single_controller import DeviceType, RankQueries, check_backend, check_names, check_type

__all__ = ["DeviceMesh", "init_device_mesh"]


class DeviceMesh(RankQueries):
    """Devices as a grid, one process for all of them.

    Args:
        device_type: `"jax"` (or `"xla"`); also the kind of JAX's devices, as `"cpu"` or `"cuda"`.
        mesh: indices in `jax.devices()`, nested lists or an integer tensor of the grid's shape.
        mesh_dim_names: one name per dimension, if there are names.

    Attributes:
        root: the mesh this one was sliced from, or itself.
        root_axes: for each of its dimensions, the dimensions of `root` that it is made of.

    Raises:
        RuntimeError: names are repeated, or are too few or too many; there are too few devices.
        ShardingError: a device is repeated, or JAX has no devices of this type.

    Example:
        >>> mesh = DeviceMesh("jax", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh.size(), mesh.size(1), mesh.mesh.tolist()
        ((2, 2), 4, 2, [[0, 1], [2, 3]])
    """

    def __init__(
        self,
        device_type: str,
        mesh: MeshLike,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Opaque = None,
    ):
        """See the class."""
        check_type(device_type)
        check_backend(backend_override)
        grid = np.asarray(mesh.tolist() if hasattr(mesh, "tolist") else mesh, dtype=int)
        grid = grid.reshape(1) if grid.ndim == 0 else grid
        names = tuple(mesh_dim_names) if mesh_dim_names else None
        check_names(names, grid.shape)
        self.root: DeviceMesh = self
        self.root_axes: tuple[tuple[int, ...], ...] = tuple((axis,) for axis in range(grid.ndim))
        self._names = names
        self._grid = grid
        self._xs_mesh = Mesh(grid.ravel(), grid.shape, names)
        self._flattened: dict[str, DeviceMesh] = {}
        program.forget_unseen()

    @property
    def device_type(self) -> str:
        """`"jax"`, as tensors' `device`."""
        name = naming.current().type
        return DeviceType(name) if name == "jax" else name

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._grid.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each dimension."""
        return self._grid.shape

    @property
    def mesh(self) -> torch.Tensor:
        """Indices in `jax.devices()`, an integer CPU tensor; of a submesh its first row."""
        return torch.tensor(self._grid.tolist(), dtype=torch.int, device="cpu")

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of its dimensions, or None."""
        return self._names

    def size(self, mesh_dim: int | None = None) -> int:
        """Devices along one dimension, or in all.

        Args:
            mesh_dim: the dimension; by default all of them.
        """
        return self._grid.size if mesh_dim is None else self._grid.shape[mesh_dim]

    def numel(self) -> int:
        """Devices in all."""
        return self._grid.size

    def get_jax_mesh(self) -> jax.sharding.Mesh:
        """The mesh for JAX, which is that of the root; dimensions without names are "0", "1", .."""
        return self.root._xs_mesh.get_jax_mesh()

    def get_xs_mesh(self) -> Mesh:
        """The mesh as an `xs.Mesh`.

        Raises:
            ShardingError: it is a submesh, or flattened; its axes are not those of the root.
        """
        if self.root is not self:
            raise ShardingError(
                f"{self} is sliced from another mesh, and an xs.Mesh is not: pass mesh.root, and "
                f"name its axes {self.root.get_jax_mesh().axis_names} in the spec"
            )
        return self._xs_mesh

    def axis_names(self, mesh_dim: int) -> tuple[str, ...]:
        """The axes of `get_jax_mesh()` that one dimension is made of, outermost first.

        Args:
            mesh_dim: the dimension.

        >>> init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["tp"].axis_names(0)
        ('tp',)
        """
        names = self.get_jax_mesh().axis_names
        return tuple(names[axis] for axis in self.root_axes[mesh_dim])

    def all_axis_names(self) -> tuple[str, ...]:
        """The axes of `get_jax_mesh()` that it is made of, in their order there.

        >>> init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["tp"].all_axis_names()
        ('tp',)
        """
        axes_of_self = {axis for axes in self.root_axes for axis in axes}
        names = self.get_jax_mesh().axis_names
        return tuple(name for axis, name in enumerate(names) if axis in axes_of_self)

    def is_part(self) -> bool:
        """Whether it is a submesh: dimensions of its root are not in it."""
        return sum(map(len, self.root_axes)) < self.root.ndim

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The submesh with the dimensions of these names.

        Raises:
            RuntimeError: the dimensions have no names.
            KeyError: a name is unknown, or they are in another order than in the mesh.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self._names is None:
            raise RuntimeError(
                f"{self} has no dimension names, so {names} cannot be looked up; pass "
                "mesh_dim_names= when it is created"
            )
        if names == self._names:
            return self
        if len(names) == 1 and names[0] in self.root._flattened:
            return self.root._flattened[names[0]]
        if unknown := [name for name in names if name not in self._names]:
            available = [*self._names, *self.root._flattened]
            raise KeyError(f"{unknown} names no dimension of {self}; it has {available}")
        dims = [self._names.index(name) for name in names]
        if dims != sorted(set(dims)):
            raise KeyError(
                f"{names} is not the order of {self}; a submesh keeps the order of the dimensions: "
                f"{tuple(name for name in self._names if name in names)}"
            )
        first = tuple(slice(None) if dim in dims else 0 for dim in range(self.ndim))
        axes = tuple(self.root_axes[dim] for dim in dims)
        return self._submesh(self._grid[first], names, axes)

    def _submesh(
        self, grid: np.ndarray, names: tuple[str, ...] | None, axes: tuple[tuple[int, ...], ...]
    ) -> DeviceMesh:
        submesh = object.__new__(DeviceMesh)
        submesh.root, submesh.root_axes, submesh._names, submesh._grid = (
            self.root,
            axes,
            names,
            grid,
        )
        submesh._xs_mesh, submesh._flattened = self.root._xs_mesh, {}
        return submesh

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """The same devices in one dimension, also available as `root[name]`, as in torch.

        Args:
            mesh_dim_name: its name; by default the names joined by "_".

        Raises:
            RuntimeError: the dimensions have no names, and none is passed.
            ValueError: the root has another dimension of this name.
        """
        if mesh_dim_name is None:
            if self._names is None:
                raise RuntimeError(
                    f"{self} has no dimension names; pass a name for the flattened dimension"
                )
            mesh_dim_name = "_".join(self._names)
        axes = (tuple(axis for dim in self.root_axes for axis in dim),)
        flat = self._submesh(self._grid.reshape(-1), (mesh_dim_name,), axes)
        present = self.root._flattened.get(mesh_dim_name)
        clash = mesh_dim_name in (self.root._names or ())
        if (clash and self.root_axes != axes) or (present is not None and present != flat):
            raise ValueError(
                f"{self.root} has a dimension {mesh_dim_name!r} already; choose another name"
            )
        if not clash:
            self.root._flattened[mesh_dim_name] = flat
        return flat

    def __enter__(self) -> DeviceMesh:
        """Make it the default mesh."""
        _stack().append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        """Go back to the mesh before."""
        _stack().pop()

    def _key(self) -> tuple[Any, ...]:
        root = self.root
        return root._grid.tobytes(), root._grid.shape, root._names, self._names, self.root_axes

    def __eq__(self, other: object) -> bool:
        """Whether it has the same devices in the same order, with the same names."""
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        """By devices, shape and names."""
        return hash(self._key())

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that makes it again, and the names in it; for graphs of `torch.compile`."""
        constructor, args = self.__reduce__()
        literals = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
        return f"{constructor.__name__}({', '.join(map(repr, literals))})", {
            constructor.__name__: constructor
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the indices of its devices."""
        return _rebuilt, (
            self.root._grid,
            self.root._names,
            self._grid,
            self._names,
            self.root_axes,
        )

    def __repr__(self) -> str:
        """Shape, names and device type; of a submesh, also of its root."""
        tail = f", of {_extents(self.root)}" if self.root is not self else ""
        return f"DeviceMesh({_extents(self)}, '{naming.current().type}'{tail})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Opaque = None,
) -> DeviceMesh:
    """A mesh of the first devices, in order.

    Args:
        device_type: as for `DeviceMesh`.
        mesh_shape: devices along each dimension.
        mesh_dim_names: one name per dimension, if there are names.
        backend_override: must be None: there are no communication backends to choose.

    Returns:
        The mesh.

    Raises:
        RuntimeError: names are repeated, or are too few or too many; there are too few devices.
        ShardingError: JAX has no devices of this type, or a backend is passed.

    Example:
        >>> init_device_mesh("jax", (8,))
        DeviceMesh((8,), 'jax')
    """
    shape = tuple(int(extent) for extent in mesh_shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(
        device_type, grid, mesh_dim_names=mesh_dim_names, backend_override=backend_override
    )


def current_mesh_or_none() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:`, else the one of `xs.set_global_mesh`, else None."""
    if stack := _stack():
        return stack[-1]
    global_mesh = get_global_mesh()
    return None if global_mesh is None else device_mesh_of(global_mesh)


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost `with mesh:`, else the one of `xs.set_global_mesh`.

    Raises:
        RuntimeError: there is neither.
    """
    if (device_mesh := current_mesh_or_none()) is not None:
        return device_mesh
    raise RuntimeError(
        "no device mesh is passed and none is active: pass device_mesh=, or write it inside "
        "`with mesh:` or after xs.set_global_mesh(mesh)"
    )


def device_mesh_of(mesh: MeshLike) -> DeviceMesh:
    """A mesh in any form as a `DeviceMesh`; the current one for None.

    Args:
        mesh: ours, an `xs.Mesh`, a `jax.sharding.Mesh`, or torch's `DeviceMesh` over indices in
            `jax.devices()`.

    Raises:
        TypeError: it is no mesh.
        RuntimeError: it is None, and no mesh is current.

    >>> import isoshard.torch_bridge as xs
    >>> device_mesh_of(xs.Mesh(range(8), (2, 4), ("x", "y")))
    DeviceMesh((x=2, y=4), 'jax')
    """
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, jax.sharding.Mesh):
        return _of_jax(mesh)
    return _of_jax(mesh_from(mesh).get_jax_mesh())


@cached(256)
def _of_jax(mesh: jax.sharding.Mesh) -> DeviceMesh:
    xla_mesh = mesh_from(mesh)
    unnamed = mesh.axis_names == tuple(map(str, range(len(mesh.axis_names))))
    names = None if unnamed else mesh.axis_names
    device_mesh = DeviceMesh("jax", xla_mesh.get_logical_mesh(), mesh_dim_names=names)
    device_mesh._xs_mesh = xla_mesh
    return device_mesh


def _rebuilt(
    grid: np.ndarray, names: Any, submesh_grid: np.ndarray, submesh_names: Any, axes: Any
) -> DeviceMesh:
    root = DeviceMesh("jax", grid, mesh_dim_names=names)
    return root if axes == root.root_axes else root._submesh(submesh_grid, submesh_names, axes)


_local = threading.local()


def _stack() -> list[DeviceMesh]:
    if not hasattr(_local, "meshes"):
        _local.meshes = []
    return _local.meshes


def _extents(mesh: DeviceMesh) -> str:
    if mesh.mesh_dim_names is None:
        return str(tuple(mesh.shape))
    named = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return f"({', '.join(f'{name}={extent}' for name, extent in named)})"
