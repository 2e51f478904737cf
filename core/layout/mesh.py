"""Meshes: the devices as a grid with named axes.

A mesh is a plain `jax.sharding.Mesh`, of any axis types (`axis_types`): `jax.make_mesh` gives
Explicit axes, `make_mesh` here Auto ones, under which the compiler propagates shardings. Arrays
remain on the mesh that they are sharded over.

>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> dict(mesh.shape)
{'x': 2, 'y': 4}
>>> make_mesh((2, 2), ("x", "y")).size                  # fewer than available: the first devices
4

A device is identified by its position in the flattened mesh, never by its id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.runtime._jax_internals import meshes

from .virtual_devices import Device

if not hasattr(Mesh, "__deepcopy__"):  # JAX 0.9, where nothing that names a mesh can be copied
    Mesh.__deepcopy__ = lambda mesh, _: mesh


def make_mesh(
    shape: Sequence[int],
    names: Sequence[str],
    *,
    devices: Sequence[Device] | None = None,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
) -> Mesh:
    """Arrange devices as a grid.

    Args:
        shape: devices along each axis.
        names: one name per axis, all different.
        devices: in order, the last axis fastest; by default the first `math.prod(shape)` of
            `jax.devices()`, ordered by the interconnect if that is all of them.
        axis_types: of all axes, or one per axis, as `jax.make_mesh` takes them.

    Returns:
        A mesh.

    Raises:
        ShardingError: `shape`, `names` and `axis_types` do not make a grid.
        DeviceError: there are too few devices.

    Example:
        >>> make_mesh((8,), ("x",), axis_types=AxisType.Explicit) == jax.make_mesh((8,), ("x",))
        True
        >>> make_mesh((4, 8), ("x", "y"))
        Traceback (most recent call last):
            ...
        isoshard.core.errors.DeviceError: a mesh of (4, 8) needs 32 devices, there are 8 (cpu). Make it smaller, or try it on virtual devices: call iso.simulate_devices(32) before anything else.
    """  # noqa: E501
    if isinstance(shape, int):
        raise ShardingError(
            f"the shape of a mesh is a tuple, one size for each name, not {shape}: "
            f"iso.make_mesh(({shape},), ('x',))"
        )
    shape, names = _check_grid(tuple(shape), tuple(names))
    kinds = _check_types(axis_types, names)
    available = list(jax.devices() if devices is None else devices)
    need = math.prod(shape)
    if len(available) < need:
        raise DeviceError(
            f"a mesh of {shape} needs {need} devices, there are {len(available)}"
            f"{_platform(available)}. Make it smaller, or try it on virtual devices: call "
            f"iso.simulate_devices({need}) before anything else."
        )
    if devices is None and len(available) == need:
        return jax.make_mesh(shape, names, kinds, devices=available)
    return Mesh(np.array(available[:need], object).reshape(shape), names, axis_types=kinds)


def hybrid_mesh(
    ici: Sequence[int],
    dcn: Sequence[int],
    names: Sequence[str],
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
) -> Mesh:
    """Arrange several slices of devices, so that axes over the slow network are explicit.

    Along each axis slices are outermost: the size is `dcn[i] * ici[i]`. Devices without a slice
    index (CPUs, one host's GPUs) are divided in order into `math.prod(dcn)` equal groups in place
    of slices: in several processes, hosts or equal fractions of hosts. `slice_axes` lists the axes
    that cross slices.

    Args:
        ici: devices along each axis within one slice (the fast interconnect).
        dcn: slices along each axis (the data centre network).
        names: one name per axis, all different.
        axis_types: as for `make_mesh`.

    Returns:
        A mesh of all devices.

    Raises:
        ShardingError: `ici`, `dcn`, `names` and `axis_types` do not match.
        DeviceError: their product is not the number of devices, or that of `dcn` not the number of
            the devices' slices.

    Example:
        >>> dict(hybrid_mesh((1, 4), (2, 1), ("data", "model")).shape)
        {'data': 2, 'model': 4}
    """
    ici, names = _check_grid(tuple(ici), tuple(names), "ici")
    dcn, names = _check_grid(tuple(dcn), names, "dcn")
    kinds = _check_types(axis_types, names)
    if math.prod(dcn) == 1 and math.prod(ici) == len(jax.devices()):
        return make_mesh(ici, names, axis_types=kinds)
    devices = jax.devices()
    need = math.prod(ici) * math.prod(dcn)
    if len(devices) != need:
        raise DeviceError(
            f"{math.prod(dcn)} slices of {math.prod(ici)} devices (dcn {dcn}, ici {ici}) are "
            f"{need} devices, there are {len(devices)}{_platform(devices)}. Change ici or dcn, "
            f"or try it on virtual devices: call iso.simulate_devices({need}) before anything else."
        )
    num_slices = len({getattr(device, "slice_index", None) for device in devices})
    if num_slices > 1:
        if num_slices != math.prod(dcn):
            raise DeviceError(
                f"the devices are in {num_slices} slices, and dcn {dcn} arranges {math.prod(dcn)}: "
                f"give the slices along each axis, with the product {num_slices}."
            )
        grid = meshes.HYBRID_MESH.resolve()(ici, dcn, devices)
        return Mesh(grid, names, axis_types=kinds)
    grid = np.array(devices, object).reshape(*dcn, *ici)
    rank = len(names)
    pairs = [axis for i in range(rank) for axis in (i, rank + i)]
    sizes = [slices * inside for slices, inside in zip(dcn, ici, strict=True)]
    return Mesh(grid.transpose(pairs).reshape(sizes), names, axis_types=kinds)


@overload
def as_mesh(obj: Any) -> Mesh: ...
@overload
def as_mesh(obj: Any, *, abstract: Literal[True]) -> Any: ...
def as_mesh(obj: Any, *, abstract: bool = False) -> Any:
    """The mesh in any form: a `jax.sharding.Mesh`, or an object that has one.

    Args:
        obj: the mesh, of any axis types, or an object with a `get_jax_mesh()` method.
        abstract: whether a mesh without devices is accepted.

    Raises:
        ShardingError: the mesh has no devices.
        TypeError: `obj` is no mesh.

    Example:
        >>> as_mesh(jax.make_mesh((8,), ("x",))).axis_types
        (Explicit,)
    """
    if isinstance(obj, Mesh):
        return obj
    if isinstance(obj, AbstractMesh):
        if abstract:
            return obj
        raise ShardingError(
            f"{obj} has no devices, and data needs some: make the mesh with "
            f"iso.make_mesh({obj.axis_sizes}, {obj.axis_names})."
        )
    convert = getattr(obj, "get_jax_mesh", None)
    if callable(convert):
        return convert()
    raise TypeError(
        f"a mesh is a jax.sharding.Mesh, as iso.make_mesh(shape, names) makes it, or has a "
        f"get_jax_mesh() method, not a {type(obj).__name__}: {obj!r}. It comes before the spec: "
        "iso.shard(x, mesh, spec)"
    )


def is_mesh(obj: Any) -> bool:
    """Whether `as_mesh` takes an object, with devices or without.

    Example:
        >>> is_mesh(make_mesh((8,), ("x",))), is_mesh(jax.P("x"))
        (True, False)
    """
    return isinstance(obj, Mesh | AbstractMesh) or callable(getattr(obj, "get_jax_mesh", None))


def ambient_mesh(call: str = "iso.shard(x, mesh, P('x'))") -> Mesh | AbstractMesh:
    """The mesh that `jax.set_mesh` has set; inside a JAX transformation an abstract one.

    Raises:
        ShardingError: there is none.

    Example:
        >>> with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        ...     dict(ambient_mesh().shape)
        {'x': 8}
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        raise ShardingError(
            f"there is no mesh argument, and jax.set_mesh has set none; pass one: {call}, or "
            "call it under `with jax.set_mesh(mesh):`."
        )
    try:
        mesh = meshes.get_mesh()
    except ValueError:  # JAX is tracing
        return abstract
    return abstract if mesh.empty else mesh


def mesh_of(sharding: NamedSharding) -> Mesh:
    """The mesh of a sharding, or ShardingError if it is abstract and has no devices."""
    if isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    raise ShardingError(
        f"{sharding} is over an abstract mesh, which has no devices, and data needs some: pass its "
        "spec together with a mesh that iso.make_mesh(shape, names) made."
    )


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """The axes of a mesh as text, for messages.

    Example:
        >>> describe_mesh(make_mesh((2, 4), ("x", "y")))
        "'x' (2), 'y' (4)"
    """
    return ", ".join(f"{name!r} ({size})" for name, size in mesh.shape.items()) or "none"


def _check_types(kinds: Any, names: tuple[str, ...]) -> tuple[AxisType, ...]:
    types = (kinds,) * len(names) if isinstance(kinds, AxisType) else tuple(kinds)
    if len(types) != len(names) or not all(isinstance(kind, AxisType) for kind in types):
        raise ShardingError(
            f"axis_types {kinds!r} with names {names} makes no mesh: give one "
            "jax.sharding.AxisType for all axes, or one per axis."
        )
    return types


def _check_grid(
    shape: tuple[int, ...], names: tuple[str, ...], label: str = "shape"
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Raise one error with all faults of a shape and its names."""
    wrong = []
    if len(shape) != len(names):
        wrong.append(f"{label} has {len(shape)} entries for {len(names)} names")
    wrong += [
        f"size {size!r} is not a positive integer"
        for size in shape
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
    ]
    wrong += [f"name {name!r} is not a string" for name in names if not isinstance(name, str)]
    wrong += [
        f"name {name!r} is used {names.count(name)} times"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if wrong:
        raise ShardingError(
            f"{label} {shape} with names {names} makes no mesh: {'; '.join(wrong)}. "
            "Give one size and one name per axis: make_mesh((2, 4), ('x', 'y'))."
        )
    return tuple(map(int, shape)), names


def _platform(devices: Sequence[Device]) -> str:
    return f" ({devices[0].platform})" if devices else ""
