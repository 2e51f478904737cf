"""The state of a training step: its argument and its result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .trained_and_rest import ModelParts, join_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a training step changes; a pytree.

    Attributes:
        step: how many steps were made, int32.
        params: the arrays that are trained.
        rest: the other arrays of the model: batch statistics, random state.
        opt_state: the state of the optimizer.
        parts: how the model is rebuilt.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from isoshard.jax_bridge.training import train_step
        >>> from jax.sharding import PartitionSpec as P
        >>> step = train_step(jnp.sum, optax.sgd(0.1), jax.make_mesh((8,), ("x",)), P("x"))
        >>> step.start(jnp.ones(8)).model.sharding.spec
        P('x',)
    """

    step: jax.Array
    params: Any
    rest: Any
    opt_state: Any
    parts: ModelParts = dataclasses.field(metadata={"static": True})

    @property
    def model(self) -> Any:
        """The model with these arrays, not copies; the next step donates them."""
        return join_parts(self.parts, self.params, self.rest)
