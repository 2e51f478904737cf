"""Values that get one sharding, without naming it: Shardy's sharding groups.

>>> import jax.numpy as jnp
>>> text = jax.jit(shard_alike).lower(jnp.ones(8), jnp.zeros(8)).as_text()
>>> text.count("sdy.sharding_group")
2
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.extend.mlir.dialects import sdy
from jax.interpreters import batching, mlir

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.jaxprs import Primitive

_ids = itertools.count()


def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Two arrays that the partitioner shards alike; what it knows of either holds for both.

    Args:
        x: an array.
        y: an array of the same shape.

    Returns:
        Both, with their values.

    Raises:
        ShardingError: when a program is compiled while JAX uses another partitioner than Shardy.
    """
    return tuple(_group_p.bind(x, y))


def _lower(context: Any, x: Any, y: Any) -> list[Any]:
    if not jax.config.jax_use_shardy_partitioner:  # pyright: ignore[reportAttributeAccessIssue]
        raise ShardingError(
            "sharding two values alike needs the partitioner Shardy, and "
            "jax_use_shardy_partitioner is off; switch it on, or name the sharding of both"
        )
    number = next(_ids)
    for value in (x, y):
        sdy.sharding_group(value, number)
    return [x, y]


def _batched(values: Any, axes: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    x, y = (batching.bdim_at_front(x, axis, size) for x, axis in zip(values, axes, strict=True))
    return _group_p.bind(x, y), (0, 0)


_group_p = Primitive("shard_alike")
_group_p.multiple_results = True
_group_p.def_impl(lambda x, y: [x, y])
_group_p.def_abstract_eval(lambda x, y: [x, y])
mlir.register_lowering(_group_p, _lower)
batching.primitive_batchers[_group_p] = _batched
