"""Create a model already sharded: no device ever holds a whole parameter.

>>> import jax.numpy as jnp
>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> init = lambda key: {"w": jax.random.normal(key, (64, 256)), "b": jnp.zeros(256)}
>>> params = create_sharded(init, mesh, Plan({"w": (None, "model")}), jax.random.key(0))
>>> params["w"].sharding.shard_shape((64, 256))
(64, 64)

The function is traced once for its shapes and once, under `jit` with the plan's shardings as its
outputs, to run; so each device computes its own part only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from .graphs import join, split
from .layout import plan_state


def create_sharded(fn: Callable[..., Any], mesh: Mesh, plan: Any, *args: Any) -> Any:
    """Run an initialiser so that its results are born in their shards.

    Args:
        fn: makes the model: a pytree of arrays (e.g. `linen_model.init`), or a Flax NNX module.
            It is traced, so random keys and `nnx.Rngs` are made inside or passed as `args`.
        mesh: the mesh, or what `as_mesh` takes.
        plan: a `Plan`, or one spec for every leaf.
        *args: arguments of `fn`, pytrees of arrays.

    Returns:
        What `fn` returns, each leaf laid out as the plan says. Values equal those of
        `jax.jit(fn)(*args)`.

    Raises:
        PlanError: the plan does not fit the leaves; nothing was computed.

    Example:
        >>> from flax import nnx
        >>> from isoshard.core.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> make = lambda: nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        >>> model = create_sharded(make, make_mesh((8,), ("x",)), Plan({"kernel": (None, "x")}))
        >>> model.kernel.sharding.spec
        P(None, 'x')
    """
    graph = None

    def state_of(*args: Any) -> Any:
        nonlocal graph
        graph, state = split(fn(*args))
        return state

    shardings = plan_state(jax.eval_shape(state_of, *args), mesh, plan)
    return join(graph, jax.jit(state_of, out_shardings=shardings)(*args))
