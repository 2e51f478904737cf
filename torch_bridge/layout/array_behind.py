"""The JAX array of a tensor on the `jax` device, as it is or with another sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.blocks.block_layout import BlockLayout, lay_out_in_blocks
from isoshard.core.errors import no_sharing
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.exchange import reshard_array
from isoshard.torch_bridge.common.argument_types import ArrayLike, LayoutLike
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Value, placed_layout


def array_behind(
    x: lazy_tensor.LazyTensor, sharding: LayoutLike, copy: bool | None, name: str
) -> Any:
    """The array of a tensor, or if a copy or another sharding is requested, a new array.

    Args:
        x: a tensor on the `jax` device; it is computed if need be.
        sharding: of the result, or None.
        copy: as of `iso.to_jax`.
        name: of the tensor, for messages.
    """
    value = lazy_tensor.read(x)
    array = input_placement.stored_array(value)
    if isinstance(array, Tracer):
        return reshard_array(array, sharding)
    if copy or (sharding is not None and placed_layout(array) != sharding_ids.intern(sharding)):
        result = in_layout(array, sharding, copy, name)
        value.shared |= input_placement.may_alias(array, result)
    else:
        result = array
        value.shared = True
    return result if sharding is not None else on_users_mesh(result, value)


def users_sharding(value: Value, sharding: jax.sharding.NamedSharding) -> Any:
    """The sharding of a value's array, restated on the mesh that the user passed."""
    mesh = sharding_ids.users_mesh(value.layout)
    if mesh is None or not sharding_ids.is_restated(value.layout):
        return sharding
    return sharding_ids.restated(sharding, mesh) or sharding


def on_users_mesh(array: ArrayLike, value: Value) -> Any:
    """The array of a value, or one in blocks, on the mesh that the user passed."""
    if not sharding_ids.is_restated(value.layout):
        return array
    if isinstance(array, UnevenArray):
        return UnevenArray(on_users_mesh(array.array, value), array.shape, array.sizes)
    jax_array: Any = array
    return jax.device_put(jax_array, users_sharding(value, jax_array.sharding))


def in_layout(array: ArrayLike, layout: LayoutLike, copy: bool | None, name: str) -> Any:
    """A JAX array, or one in blocks, with another sharding.

    Raises:
        CopyError: `copy` is False, and the sharding takes new memory.
    """
    if not isinstance(array, UnevenArray) and not isinstance(layout, BlockLayout):
        return reshard_array(array, layout, copy=copy, name=name)
    if copy:
        array = jax.tree.map(jnp.copy, array)
    if layout is None or placed_layout(array) == sharding_ids.intern(layout):
        return array
    if copy is False:
        raise no_sharing(name, "blocks of other sizes are padded, which takes new memory")
    return lay_out_in_blocks(array, layout)
