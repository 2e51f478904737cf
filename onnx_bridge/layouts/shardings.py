"""Shardings: a ShardingSpecProto as the NamedSharding over a mesh.

>>> import jax
>>> import numpy as np
>>> proto = onnx.ShardingSpecProto(tensor_name="w", device=[0, 1])
>>> _ = proto.sharded_dim.add(axis=1, simple_sharding=[onnx.SimpleShardedDimProto(num_shards=2)])
>>> sharding = from_sharding_spec(proto, (2, 2))         # no mesh given: one is made to fit
>>> dict(sharding.mesh.shape), sharding.spec
({'d0': 2}, P(None, 'd0'))
>>> placed = jax.device_put(np.array([[1, 2], [3, 4]]), sharding)
>>> [shard.data.tolist() for shard in placed.addressable_shards]
[[[1], [3]], [[2], [4]]]

What a NamedSharding cannot say raises `AnnotationError`, with the tensor, the axis and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import onnx
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import Tiles, UnrepresentableError, as_mesh, named_sharding

from ..errors import AnnotationError
from .meshes import NumberedMesh, fitting_mesh, numbered_devices, renumbered, submesh
from .tiling import read_tiles, replicate_axes, uneven_axes

Dims = Sequence[int | str | None]
Uneven = Literal["error", "replicate"]


def from_sharding_spec(
    proto: onnx.ShardingSpecProto,
    shape: Dims | None = None,
    mesh: Mesh | None = None,
    *,
    uneven: Uneven = "error",
) -> NamedSharding:
    """Read the layout of one tensor.

    Args:
        proto: the message.
        shape: of the tensor: a size, the name of a size, or None per axis. Not given: as many axes
            as the message speaks of.
        mesh: whose flattened devices the message numbers; by default one is made to fit, of
            `jax.devices()`.
        uneven: what to do with an axis that does not split evenly: raise, or "replicate" it.

    Returns:
        The layout. If the message names a part of the mesh only, it is over that part.

    Raises:
        AnnotationError: the message contradicts itself, the shape or the mesh, or says what no
            NamedSharding does.
        DeviceError: no mesh is given, and there are too few devices.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> proto = onnx.ShardingSpecProto(tensor_name="w", device=[0, 2, 1, 3])
        >>> shards = [onnx.SimpleShardedDimProto(num_shards=4)]
        >>> _ = proto.sharded_dim.add(axis=0, simple_sharding=shards)
        >>> from_sharding_spec(proto, (8,), make_mesh((2, 2), ("x", "y"))).spec
        P(('y', 'x'),)
        >>> from_sharding_spec(proto, (8,), make_mesh((4,), ("x",)))
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.AnnotationError: tensor 'w': blocks (4,) on devices [0, 2, 1, 3] follow no order of the mesh axes 'x' (4); reorder the mesh's devices, or reshard first
    """  # noqa: E501
    mesh = None if mesh is None else as_mesh(mesh)
    name = proto.tensor_name
    tiles = read_tiles(proto, shape, None if mesh is None else mesh.size)
    tiles = even_tiles(tiles, shape, name, uneven)
    device_ids = named_devices([tiles])
    try:
        if mesh is None:
            over = fitting_mesh([tiles], device_ids, numbered_devices(device_ids))
        else:
            over = submesh(mesh, device_ids)
    except AnnotationError as error:
        raise error.at(tensor=name) from None
    return sharding_over(over, tiles, name)


def named_devices(tiles: Sequence[Tiles]) -> list[int]:
    """The devices that layouts name, in ascending order.

    Example:
        >>> named_devices([Tiles([[4], [6]], num_devices=8), Tiles([[4, 5]], num_devices=8)])
        [4, 5, 6]
    """
    return sorted({int(device) for tile in tiles for device in tile.grid.flat})


def even_tiles(tiles: Tiles, shape: Dims | None, name: str, uneven: Uneven) -> Tiles:
    """Deal with axes that do not split evenly."""
    axes = uneven_axes(tiles, shape)
    if axes and uneven == "error":
        raise AnnotationError(
            f"its size {(shape or ())[axes[0]]} is no multiple of its {tiles.blocks[axes[0]]} "
            "shards, and JAX splits evenly only; pad the tensor, or pass uneven='replicate' to "
            "leave the axis unsharded",
            tensor=name,
            axis=axes[0],
        )
    return replicate_axes(tiles, axes) if axes else tiles


def sharding_over(over: NumberedMesh, tiles: Tiles, name: str) -> NamedSharding:
    """The layout as a spec over a mesh."""
    named = named_devices([tiles])
    if named != sorted(over.device_ids):
        raise AnnotationError(
            f"it is on devices {named}, and its mesh on {sorted(over.device_ids)}: the tensors of "
            "one program are on the same devices; name the others as copies, or put its nodes "
            "into a stage of their own",
            tensor=name,
        )
    try:
        spec = renumbered(tiles, over.device_ids).to_spec(over.mesh)
    except UnrepresentableError as error:
        raise AnnotationError(str(error), tensor=name) from None
    return named_sharding(spec, over.mesh, tiles.ndim)
