"""Bringing arrays to the devices of a program, each in its layout."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.blocks.block_layout import BlockLayout, lay_out_in_blocks
from isoshard.core.blocks.packing import unpack
from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import UnevenArray, padded_of
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.host_memory import host_to_jax
from isoshard.core.transfer.reshard import reshard_array
from isoshard.torch_bridge.engine.recording.recorder import materialize, recorder
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refine, rewrap
from isoshard.torch_bridge.engine.values.value import Taken, Value, placed_layout


def place(values: Sequence[Value | Taken], also: Collection[int] = ()) -> list[jax.Array]:
    """Bring inputs to the devices of one program, each in its layout.

    A value without a requested layout is replicated over the devices of those that have one.

    Args:
        values: the inputs.
        also: layouts of the program's constraints and results; the mesh is fine enough for them.
    """
    with _PLACING:
        return _placed(values, also)


_PLACING = threading.RLock()
"""Locked while values are moved, which several threads may move elsewhere."""


def _placed(values: Sequence[Value | Taken], also: Collection[int]) -> list[jax.Array]:
    common = _common_layout(values)
    if common is None:
        for value in values:
            if isinstance(value.array, np.ndarray):
                _bring(value, None)
        return [value.array for value in values]
    requested, final = layouts_on(common, values, also)
    for value, layout_id, finer in zip(values, requested, final, strict=True):
        if value.layout == layout_id:
            _settle(value)
        else:
            value.layout = layout_id
            _bring(value, sharding_ids.layout(layout_id))
        if finer != layout_id:
            value.layout = finer
            value.array = rewrap(value.array, finer)
    return [value.array for value in values]


def planned(values: Sequence[Value | Taken], also: Collection[int] = ()) -> list[int]:
    """The layouts that `place` would give inputs, without moving anything."""
    common = _common_layout(values)
    return (
        [sharding_ids.UNPLACED] * len(values)
        if common is None
        else layouts_on(common, values, also)[1]
    )


def layouts_on(
    common: int, values: Sequence[Value | Taken], also: Collection[int]
) -> tuple[list[int], list[int]]:
    """Each input's layout on the devices of `common`; and the same over the mesh that fits all.

    Args:
        common: a layout on the devices of the program.
        values: the inputs.
        also: as for `place`.
    """
    devices = sharding_ids.devices(common)
    layout_ids = [
        value.layout
        if value.layout != sharding_ids.UNPLACED and sharding_ids.devices(value.layout) == devices
        else sharding_ids.replicated_like(common)
        for value in values
    ]
    others = {layout_id for layout_id in also if sharding_ids.devices(layout_id) == devices}
    finer = refine(set(layout_ids) | others)
    return layout_ids, [finer.get(layout_id, layout_id) for layout_id in layout_ids]


def settle(values: Sequence[Value]) -> None:
    """Bring values that no program reads to the layout of their mark."""
    with _PLACING:
        for value in values:
            if value.layout != sharding_ids.UNPLACED:
                _settle(value)
            elif isinstance(value.array, np.ndarray):
                _bring(value, None)


def _settle(value: Value | Taken) -> None:
    array = value.array
    if (
        isinstance(array, jax.Array)
        and array.committed
        and sharding_ids.intern(array.sharding) == value.layout
    ):
        return
    if isinstance(array, np.ndarray) or (
        array.sharding is not sharding_ids.layout(value.layout)
        and placed_layout(array) != sharding_ids.untyped(value.layout)
    ):
        _bring(value, sharding_ids.layout(value.layout))
        if value.shared and not may_alias(array, value.array):
            value.shared = False


def may_alias(old: Any, new: Any) -> bool:
    """Whether JAX may have kept buffers of an array when it resharded it.

    It does on a device that stores as much before as after: the first copy of a replicated array.
    """
    if isinstance(old, np.ndarray):
        return False
    old, new = padded_of(old), padded_of(new)
    return old is new or (
        old.shape == new.shape
        and old.sharding.shard_shape(old.shape) == new.sharding.shard_shape(new.shape)
        and not old.sharding.device_set.isdisjoint(new.sharding.device_set)
    )


def _common_layout(values: Sequence[Value | Taken]) -> int | None:
    """A layout on the devices that the program will run on, or None for the default device."""
    layout_ids = {value.layout for value in values} - {sharding_ids.UNPLACED}
    best: Any = None
    for layout_id in layout_ids:
        if best is None or len(sharding_ids.devices(layout_id)) > len(sharding_ids.devices(best)):
            best = layout_id
    for layout_id in layout_ids:
        have, want = sharding_ids.devices(layout_id), sharding_ids.devices(best)
        if len(have) > 1 and have != want:
            raise ShardingError(
                "one program cannot use meshes that order the devices differently: one tensor is "
                f"sharded over devices {[d.id for d in want]}, another over "
                f"{[d.id for d in have]}; mark both with the same mesh, or move one with "
                "isoshard.reshard(tensor, mesh, spec)"
            )
    return best


def _bring(value: Value | Taken, layout: sharding_ids.Layout | None) -> None:
    with jax.enable_x64(True), jax.ensure_compile_time_eval():  # it outlives a trace around this
        _move(value, layout)


def _move(value: Value | Taken, layout: sharding_ids.Layout | None) -> None:
    array = value.array
    if isinstance(array, np.ndarray):
        started = time.perf_counter()
        if isinstance(layout, BlockLayout):
            value.array = lay_out_in_blocks(array, layout)
        elif _is_addressable(layout):
            value.array = jax.device_put(array, layout, may_alias=True)
        else:  # replicated over processes; device_put would compare the values in a collective
            value.array = host_to_jax(array, layout)
        seconds = time.perf_counter() - started
        metrics.record_transfer("host_to_device", array.nbytes, value.origin, seconds)
    else:
        metrics.count("transfers.between_devices")
        if isinstance(layout, BlockLayout):
            value.array = lay_out_in_blocks(array, layout)
            return
        if isinstance(array, UnevenArray):
            value.array = array if layout is None else lay_out_in_blocks(array, layout)
            return
        move = jax.device_put if _is_addressable(layout) else reshard_array
        value.array = move(array, layout)


def _is_addressable(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether no other process has a shard."""
    return sharding is None or sharding.is_fully_addressable


def array_of(value: Value) -> jax.Array:
    """The placed array of a value, computing it if need be.

    One in a `BlockLayout` is gathered along its padded axes, which is counted; see `stored_array`.
    """
    array = stored_array(value)
    if isinstance(array, UnevenArray):
        metrics.count("gathers")
        with jax.enable_x64(True):
            return unpack(array)
    return array


def stored_array(value: Value) -> Any:
    """The placed `jax.Array` or `UnevenArray` of a value, computing it if need be.

    Whatever leaves the engine leaves it here.

    Raises:
        CaptureError: a step is being captured, whose replays would find this very array again.
    """
    recorder().check_handing_out()
    return placed(value)


def placed(value: Value) -> Any:
    """As `stored_array`, for callers that only read its sharding."""
    if value.array is None:
        materialize([value])
    if not isinstance(value.array, Tracer):
        settle([value])
    array = value.array
    if isinstance(array, jax.Array | UnevenArray):
        return array
    with jax.enable_x64(True):
        return jnp.asarray(array)
