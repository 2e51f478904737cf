"""The crossing: what torch has trained, used from JAX in the same buffers.

There are two ways. `iso.jax_function` turns the torch module into a pure function; a Flax model
has the same arrays as its parameters. Neither copies a byte, and `Crossing` proves it: by the
counter of copied bytes, and by the addresses of all buffers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx

import isoshard as iso

from . import flax_model
from .data import Corpus
from .model import BATCH, PLAN, Config
from .training import MAX_NORM, SETTLING, Run, Settings, mean_and_speed, validation_batches

TIMED_STEPS = 5

Params = Any  # a pytree of arrays
Forward = Callable[[Params, jax.Array], jax.Array]
Loss = Callable[[Params, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass
class Crossing:
    """What came of the buffers in JAX.

    Attributes:
        function: losses and speeds of the torch module as a JAX function.
        flax: those of the Flax model.
        copied_bytes: between frameworks, on the way.
        buffers: of the parameters, on all devices.
        shared: how many of them have one address in torch, the function and the Flax model.
    """

    function: Run
    flax: Run
    copied_bytes: int
    buffers: int
    shared: int


def cross(
    model: torch.nn.Module, config: Config, mesh: iso.Mesh, corpus: Corpus, settings: Settings
) -> Crossing:
    """Use a trained torch model in JAX in both ways, and measure it.

    Args:
        model: sharded over `mesh`.
        config: its sizes.
        mesh: with axes "data" and "model".
        corpus: the text.
        settings: batch size and number of validation batches.

    Returns:
        Losses, speeds and what was copied.
    """
    before = _copied_bytes()
    function = iso.jax_function(model)
    jax_model = flax_model.adopt(config, function.params)
    iso.shard(jax_model, mesh, PLAN, copy=False)  # the same plan; raises if an array had to move
    copied = _copied_bytes() - before

    owners = dict(model.named_parameters()), function.params, flax_model.named_parameters(jax_model)
    buffers, shared = count_shared(*owners)
    graph, state = nnx.split(jax_model, nnx.Param)
    task = _Task(mesh, corpus, settings, config.length)
    return Crossing(
        task.measure("JAX function", function, function.params),
        task.measure("Flax NNX twin", lambda state, x: nnx.merge(graph, state)(x), state),
        copied,
        buffers,
        shared,
    )


def count_shared(*owners: Mapping[str, Any]) -> tuple[int, int]:
    """Compare the addresses of arrays that several owners have under the same names.

    Args:
        *owners: arrays or tensors by name.

    Returns:
        How many buffers there are, one per array and device, and how many of them have the same
        address for all owners.

    Example:
        >>> import jax.numpy as jnp
        >>> a = jnp.ones(3)
        >>> count_shared({"a": a, "b": a}, {"a": a, "b": a + 1})
        (2, 1)
    """
    addresses = [
        [
            shard.data.unsafe_buffer_pointer()
            for name in owners[0]
            for shard in iso.local_shards(owner[name])
        ]
        for owner in owners
    ]
    same = [len(set(pointers)) == 1 for pointers in zip(*addresses, strict=True)]
    return len(same), sum(same)


@dataclasses.dataclass(frozen=True)
class _Task:
    """The text on its mesh, for any model with JAX parameters."""

    mesh: iso.Mesh
    corpus: Corpus
    settings: Settings
    length: int

    def measure(self, name: str, forward: Forward, params: Params) -> Run:
        """Validation loss and speed, and the speed of training steps whose results are dropped."""
        run = Run(name)

        def loss(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
            logits = forward(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        replicated = jax.sharding.NamedSharding(self.mesh, iso.P())
        completed: Any = jax.sharding.auto_axes(loss, out_sharding=replicated)  # by the compiler
        evaluate = jax.jit(completed)
        run.validation, run.validation_speed = mean_and_speed(
            lambda *batch: float(evaluate(params, *self._sharded(batch))),
            validation_batches(self.corpus, self.settings, self.length),
        )
        run.speed = self._training_speed(completed, params)
        return run

    def _training_speed(self, loss: Loss, params: Params) -> float:
        optimizer = optax.chain(
            optax.clip_by_global_norm(MAX_NORM), optax.adamw(self.settings.learning_rate)
        )

        @jax.jit
        def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any]:
            updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
            return optax.apply_updates(params, updates), state

        size = {"batch": self.settings.batch, "length": self.length}
        state = jax.block_until_ready((params, optimizer.init(params)))
        started = time.perf_counter()
        for index in range(SETTLING + TIMED_STEPS):
            if index == SETTLING:
                started = time.perf_counter()
            batch = self.corpus.training_batch(index, **size)
            state = jax.block_until_ready(step(*state, *self._sharded(batch)))
        seconds = time.perf_counter() - started
        return TIMED_STEPS * self.settings.batch * self.length / seconds

    def _sharded(self, batch: Iterable[np.ndarray]) -> list[jax.Array]:
        return [iso.shard(array.astype(np.int32), self.mesh, BATCH) for array in batch]


def _copied_bytes() -> int:
    return iso.metrics.counters().get("copied_bytes", 0)
