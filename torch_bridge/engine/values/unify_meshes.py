"""Operands of one operation that are on several meshes.

A tensor that is replicated over its mesh goes to the devices of the others: each device would store
the same. So does a tensor that was not sharded by its user, and that is on a mesh only because a
program over that mesh computed it. Operands that are split over two meshes raise, since the mesh of
the result would be ambiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import ShardingError
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime import metrics
from isoshard.core.transfer.reshard import reshard_array

from . import sharding_ids
from .value import Value


def unified(name: str, values: Sequence[Value]) -> list[Value]:
    """Values on the devices of one mesh, or on none; those that are on it already as they are.

    Raises:
        ShardingError: several meshes have one that is split over them.
    """
    placed = [value.layout for value in values if _is_on_mesh(value.layout)]
    split = [layout_id for layout_id in placed if not _is_replicated(layout_id)]
    groups = list(dict.fromkeys(sharding_ids.devices(layout_id) for layout_id in split))
    if len(groups) > 1:
        raise differently_numbered(name, groups)
    target = [*split, *placed][0] if placed else sharding_ids.UNPLACED
    return [
        value
        if not _is_on_mesh(value.layout)
        or sharding_ids.devices(value.layout) == sharding_ids.devices(target)
        else _moved(value, sharding_ids.replicated_like(target))
        for value in values
    ]


def differently_numbered(name: str, groups: Sequence[tuple[Device, ...]]) -> ShardingError:
    """The error for operands on several meshes."""
    orders = " and ".join(str([device.id for device in group]) for group in groups)
    return ShardingError(
        f"{name} has operands on meshes that order the devices differently: {orders}. Mark both "
        "with the same mesh, or move one with isoshard.reshard(tensor, mesh, spec)."
    )


def _is_on_mesh(layout_id: int) -> bool:
    return layout_id != sharding_ids.UNPLACED and len(sharding_ids.devices(layout_id)) > 1


def _is_replicated(layout_id: int) -> bool:
    layout = sharding_ids.layout(layout_id)
    return not isinstance(layout, BlockLayout) and layout.is_fully_replicated


def _moved(value: Value, layout_id: int) -> Value:
    """The same array, replicated over the devices of another layout; the value is unchanged."""
    metrics.count("transfers.between_devices")
    replicated = sharding_ids.sharding(layout_id)
    move = jax.device_put if replicated.is_fully_addressable else reshard_array
    with jax.enable_x64(True):
        result = Value(move(value.array, replicated), layout_id)
    result.shared = value.shared = True  # JAX may keep a buffer of a device that both are on
    return result
