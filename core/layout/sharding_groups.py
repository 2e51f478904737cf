"""Values constrained to have the same sharding: Shardy's sharding groups.

>>> import jax.numpy as jnp
>>> text = jax.jit(shard_alike).lower(jnp.ones(8), jnp.zeros(8)).as_text()
>>> text.count("sdy.sharding_group")
2
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.compilation import SHARDING_GROUP
from isoshard.core.runtime.primitives import new_primitive

_ids = itertools.count()


def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Constrain two arrays of the same shape to the same sharding, which the partitioner chooses.

    Args:
        x: an array.
        y: an array of the same shape.

    Raises:
        ShardingError: when a program is compiled while JAX uses another partitioner than Shardy.
    """
    return tuple(_group_p.bind(x, y))


def _lower(context: Any, x: Any, y: Any) -> list[Any]:
    if not jax.config.jax_use_shardy_partitioner:
        raise ShardingError(
            "giving two values the same sharding needs the partitioner Shardy, and "
            "jax_use_shardy_partitioner is off; switch it on, or constrain both to a sharding"
        )
    group_id, sharding_group = next(_ids), SHARDING_GROUP.resolve()
    for value in (x, y):
        sharding_group(value, group_id)
    return [x, y]


def _batched(values: Any, axes: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    x, y = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, axes, strict=True)
    )
    return _group_p.bind(x, y), (0, 0)


_group_p = new_primitive(
    "shard_alike",
    lambda x, y: [x, y],
    lambda x, y: [x, y],
    lowering=_lower,
    batch=_batched,
    several=True,
)
