"""How the rows of a batch, and the heads of a cache, are sharded: as the model's weights say."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import axis_names
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor
from isoshard.torch_bridge.layout import marks


def row_sharding(model: Any, rows: int, ids: Any) -> jax.sharding.NamedSharding | None:
    """The sharding of a batch's rows.

    Args:
        model: whose parameters give the mesh.
        rows: of the batch.
        ids: the prompt; if it is sharded along its rows, so is the batch.

    Returns:
        Over the axes of the prompt, else over those that shard no parameter, as far as they divide
        the rows. None if no parameter is on a mesh.
    """
    shardings = [
        sharding
        for parameter in model.parameters()
        if isinstance(parameter, LazyTensor)
        and (sharding := marks.requested_sharding(parameter)) is not None
    ]
    if not shardings:
        return None
    mesh = shardings[0].mesh
    prompt = marks.requested_sharding(ids) if isinstance(ids, LazyTensor) else None
    if prompt is not None and prompt.mesh == mesh and prompt.spec:
        candidates = axis_names(prompt.spec[0])
    else:
        used = {
            name for sharding in shardings for entry in sharding.spec for name in axis_names(entry)
        }
        candidates = [name for name in mesh.axis_names if name not in used]
    axes: list[str] = []
    for name in candidates:
        if rows % math.prod(mesh.shape[axis] for axis in (*axes, name)) == 0:
            axes.append(name)
    return jax.NamedSharding(mesh, P(tuple(axes) or None))


def cache_sharding(
    model: Any, heads: int, split: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding:
    """The sharding of a cache's keys and values, (rows, heads, tokens, size).

    Args:
        model: whose key projections (`k_proj`) say how heads are sharded; those of a model without
            are replicated.
        heads: of the keys.
        split: of the rows.
    """
    rows, axes = split.spec[0], ()
    for name, parameter in model.named_parameters():
        sharding = marks.requested_sharding(parameter)
        if name.endswith("k_proj.weight") and sharding is not None and sharding.spec:
            axes = tuple(axis_names(sharding.spec[0]))
            break
    size = math.prod(split.mesh.shape[axis] for axis in axes)
    if heads % size or {*axes} & {*axis_names(rows)}:
        axes = ()
    return jax.NamedSharding(split.mesh, P(rows, axes or None, None, None))
