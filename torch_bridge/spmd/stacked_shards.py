"""The pieces of a whole, stacked along a leading axis: shapes, and the way back.

>>> from isoshard import P, make_mesh
>>> rows = jax.sharding.NamedSharding(make_mesh((2, 4), ("x", "y")), P("x"))
>>> stacked_shape((8, 6), rows), whole_shape((8, 4, 6), rows)
((8, 4, 6), (8, 6))
"""

from __future__ import annotations

from typing import Any

import jax

from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge.argument_types import DeviceTensor, Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.layout import marks


def laid_whole(value: Value, stacked: DeviceTensor, sharding: jax.sharding.NamedSharding) -> Any:
    """The new tensor of a whole that lies as its pieces.

    Args:
        value: of the whole.
        stacked: the pieces.
        sharding: how they lie in the whole.
    """
    if value.array is None:
        value.layout = layout_numbers.intern(sharding)
    shape = whole_shape(tuple(stacked.shape), sharding)
    whole = lazy_tensor.fresh(Aval.contiguous(shape, stacked.dtype), value)
    marks.keep(whole, sharding, None)
    return whole


def stacked_shape(
    shape: tuple[int, ...], sharding: jax.sharding.NamedSharding, *_: Opaque
) -> tuple[int, ...]:
    """The shape of all pieces of a whole, stacked; extents may be symbols of torch."""
    blocks = marks.groups(sharding, len(shape)).shape[:-1]
    pieces = [extent // count for extent, count in zip(shape, blocks, strict=True)]
    return (mesh_of(sharding).size, *pieces)


def whole_shape(
    shape: tuple[int, ...], sharding: jax.sharding.NamedSharding, *_: Opaque
) -> tuple[int, ...]:
    """The shape of the whole of stacked pieces."""
    blocks = marks.groups(sharding, len(shape) - 1).shape[:-1]
    return tuple(extent * count for extent, count in zip(shape[1:], blocks, strict=True))
