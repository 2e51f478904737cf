"""Training in JAX: one compiled step, `optax`, and fields in shards of any sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard import P

from .place import Place, gathered
from .problems import Data, Problem
from .runs import Run, taken


@iso.domain.lift
def mean_square(x: jax.Array, y: jax.Array) -> jax.Array:
    """Over the places of two fields; padding does not count."""
    return jnp.mean((x - y) ** 2)


def train(problem: Problem, data: Data, place: Place, steps: int | None = None) -> Run:
    """Train from the parameters that torch begins with.

    Args:
        problem: what is learned.
        data: of it.
        place: the sharding of the fields; parameters are replicated.
        steps: how many; by default the problem's.

    Returns:
        The run.
    """
    steps = steps or problem.steps
    optimizer = optax.adam(optax.cosine_decay_schedule(problem.rate, problem.steps))
    named = problem.initial().named_parameters()
    initial = {name: parameter.detach().numpy() for name, parameter in named}
    everywhere = NamedSharding(place.mesh, P())
    params: Any = jax.device_put(initial, everywhere)
    state = jax.device_put(optimizer.init(params), everywhere)
    forward = functools.partial(problem.function, place=place)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=everywhere)
    def step(params, state, x, y):
        def loss_of(params):
            return mean_square(forward(params, x), y)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses: list[float] = []
    compiled: Any = None
    for x, y in data.batches(problem.batch, steps):
        arguments = (params, state, place.put(x), place.put(y))
        compiled = compiled or step.lower(*arguments).compile()
        params, state, loss = compiled(*arguments)
        losses.append(float(loss))
    later = jax.jit(forward)

    def predict(fields: np.ndarray) -> np.ndarray:
        return gathered(later(params, place.put(fields)))

    return Run(losses, predict, taken(compiled.memory_analysis()), compiled.as_text())
