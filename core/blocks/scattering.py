"""Scattering with the local shapes of each mesh axis, as ShardTensor's users write them.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((4,), ("x",))
>>> rows = np.ones((18, 3), np.float32)
>>> scatter_tensor(rows, mesh, ("x",), {0: [(5, 3), (2, 3), (7, 3), (4, 3)]})
UnevenArray(float32[18,3] in float32[28,3], axis 0 in blocks of 7: 5, 2, 7, 4 valid; P('x',))

Source: PhysicsNeMo, `ShardTensor.from_local(sharding_shapes=)` and `scatter_tensor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import as_mesh, describe_mesh
from isoshard.core.layout.spec import axis_names, normalize_spec
from isoshard.core.transfer.device_put import shard


def scatter_tensor(
    tensor: Any,
    mesh: Mesh,
    placements: Any,
    sharding_shapes: Any = "chunk",
    *,
    name: str | None = None,
) -> Any:
    """Shard a global array in shards of given shapes.

    Args:
        tensor: a NumPy or JAX array, or a torch tensor, unsplit.
        mesh: the mesh, or what `as_mesh` takes.
        placements: any spelling of a spec; DTensor placements once the torch bridge is loaded.
        sharding_shapes: "chunk" for those of `torch.chunk`; or for mesh axes, by name or index, the
            local shapes along them in order. Of each the size of the axis that is split counts,
            and the others must be those of the array or of a shard of it.
        name: of the array, for messages.

    Returns:
        An UnevenArray; a jax.Array if all shards are of one shape. Of a torch tensor, a tensor on
        the `jax` device.

    Raises:
        ShardingError: shapes are of another rank, of a mesh axis that splits nothing or that splits
            an axis together with others (UnevenError: sizes do not sum to the axis).

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((2,), ("x",))
        >>> scatter_tensor(np.arange(4), mesh, ("x",), {"x": [(1,), (3,)]}).sizes
        ((1, 3),)
    """
    mesh, name = as_mesh(mesh), name or "array"
    spec = normalize_spec(placements, mesh, tensor.ndim, name=name)
    if isinstance(sharding_shapes, str):
        if sharding_shapes != "chunk":
            raise ShardingError(
                f"{name}: sharding_shapes is 'chunk' or a mapping, got {sharding_shapes!r}; "
                "what each process has alone is sharded with iso.from_local"
            )
        return shard(tensor, mesh, spec, uneven="pad", name=name)
    split = {}
    for axis, entry in enumerate(spec):
        for mesh_axis in axis_names(entry):
            split[mesh_axis] = (axis, len(axis_names(entry)))
    sizes, errors = _sizes(sharding_shapes, tuple(tensor.shape), mesh, split)
    if errors:
        raise ShardingError(
            f"{name}: sharding_shapes do not fit shape {tuple(tensor.shape)} by {spec}: "
            f"{'; '.join(errors)}. Give one local shape per device along a mesh axis that splits "
            f"an axis alone; the mesh axes are {describe_mesh(mesh)}."
        )
    return shard(tensor, mesh, spec, uneven="pad", sizes=sizes, name=name)


def _sizes(
    shapes: Mapping[Any, Sequence[Sequence[int]]],
    shape: tuple[int, ...],
    mesh: Mesh,
    split: Mapping[str, tuple[int, int]],
) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """The sizes along each tensor axis, and the errors of the shapes."""
    sizes, errors = {}, []
    names = mesh.axis_names
    for key, local in shapes.items():
        is_index = isinstance(key, int | np.integer) and 0 <= key < len(names)
        mesh_axis = str(names[key] if is_index else key)
        if mesh_axis not in names:
            errors.append(f"there is no mesh axis {key!r}")
        elif mesh_axis not in split:
            errors.append(f"mesh axis {key!r} splits no axis")
        elif split[mesh_axis][1] > 1:
            errors.append(f"mesh axis {key!r} splits axis {split[mesh_axis][0]} with others")
        elif wrong := [
            tuple(local_shape) for local_shape in local if len(local_shape) != len(shape)
        ]:
            errors.append(f"along {key!r} there are shapes of another rank: {wrong}")
        else:
            axis = split[mesh_axis][0]
            unsplit = {
                at
                for at in range(len(shape))
                if all(at != local_shape for local_shape, _ in split.values())
            }
            for local_shape in local:
                errors += [
                    f"along {key!r} a shape is {tuple(local_shape)}, and axis {at} has {shape[at]}"
                    for at in sorted(unsplit)
                    if local_shape[at] != shape[at]
                ]
            sizes[axis] = tuple(int(local_shape[axis]) for local_shape in local)
    return sizes, errors
