"""Writing: a NamedSharding as ONNX's ShardingSpecProto.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> sharding = NamedSharding(make_mesh((2, 2), ("data", "model")), P("model"))
>>> print(to_sharding_spec(sharding, "up.weight", (16, 8)))
tensor_name: "up.weight"
device: -1
device: -2
index_to_device_group_map {
  key: -1
  value: 0
  value: 2
}
index_to_device_group_map {
  key: -2
  value: 1
  value: 3
}
sharded_dim {
  axis: 0
  simple_sharding {
    dim_value: 16
    num_shards: 2
  }
}
<BLANKLINE>

A block that is on one device is written as that device; one that is on several as a group with
a negative key. Split axes stand in ascending order, each with one number of shards, however many
mesh axes split it: so readers that go by the order listed and readers that go by the axes agree.

Source: onnx.proto and docs/proposals/0006-ONNXMultiDeviceProposal.md of onnx.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from jax.sharding import NamedSharding

from isoshard.core.kit import ShardingError, Tiles, canonical_spec, mesh_of

from ..errors import AnnotationError

Dims = Sequence[int | str | None]


def to_sharding_spec(
    sharding: NamedSharding,
    tensor_name: str,
    shape: Dims | None = None,
    *,
    devices: Sequence[int] | None = None,
) -> onnx.ShardingSpecProto:
    """Write a layout for one tensor of a node.

    Args:
        sharding: the layout, over a mesh with devices.
        tensor_name: of an input or output of the node.
        shape: a size, the name of a size, or None per axis; sizes and names are written beside the
            number of shards. Not given: as many axes as the spec has entries.
        devices: the index of each device of the mesh in the file, in the order of the flattened
            mesh; by default the position itself.

    Returns:
        The message.

    Raises:
        AnnotationError: an axis does not split evenly, the spec has more entries than the tensor
            axes, or it says what ONNX has no words for: unconstrained axes, sums not taken yet.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> sharding = NamedSharding(make_mesh((2,), ("x",)), P("x"))
        >>> to_sharding_spec(sharding, "w", (3,))
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.AnnotationError: tensor 'w', axis 0: its size 3 is no multiple of its 2 shards. Pad it to 4, or split another axis.
    """  # noqa: E501
    mesh, spec = mesh_of(sharding), sharding.spec
    ndim = len(spec) if shape is None else len(shape)
    try:
        spec = canonical_spec(spec, mesh, ndim, "the layout")
    except ShardingError as error:
        raise AnnotationError(str(error), tensor=tensor_name) from None
    tiles = Tiles.from_sharding(NamedSharding(mesh, spec), ndim)
    return write_tiles(tiles, tensor_name, shape, devices=devices)


def write_tiles(
    tiles: Tiles,
    tensor_name: str,
    shape: Dims | None = None,
    *,
    devices: Sequence[int] | None = None,
) -> onnx.ShardingSpecProto:
    """Write a layout that is known by its tiles.

    Example:
        >>> list(write_tiles(Tiles([[0], [2], [1], [3]]), "w").device)
        [0, 2, 1, 3]
    """
    dims = (None,) * tiles.ndim if shape is None else tuple(shape)
    proto = onnx.ShardingSpecProto(tensor_name=tensor_name)
    for group in tiles.grid.reshape(-1, tiles.replicas).tolist():
        members = sorted(group if devices is None else (devices[device] for device in group))
        if len(members) == 1:
            proto.device.append(members[0])
            continue
        key = -1 - len(proto.index_to_device_group_map)
        proto.device.append(key)
        proto.index_to_device_group_map.add(key=key, value=members)
    for axis, (count, dim) in enumerate(zip(tiles.blocks, dims, strict=True)):
        if count > 1:
            _check_even(tensor_name, axis, dim, count)
            simple = onnx.SimpleShardedDimProto(num_shards=count)
            if isinstance(dim, str):
                simple.dim_param = dim
            elif dim is not None:
                simple.dim_value = dim
            proto.sharded_dim.add(axis=axis, simple_sharding=[simple])
    return proto


def _check_even(tensor: str, axis: int, dim: int | str | None, count: int) -> None:
    if isinstance(dim, int) and dim % count:
        raise AnnotationError(
            f"its size {dim} is no multiple of its {count} shards. Pad it to "
            f"{-(-dim // count) * count}, or split another axis.",
            tensor=tensor,
            axis=axis,
        )
