"""The random state of the `jax` device: a seed and a counter.

Every random operation takes the key `fold_in(key(seed), counter)` and moves the counter by one.
Seed and counter are inputs of compiled programs, so a program is reused for fresh numbers; and JAX's
keys are partitionable, so the numbers do not depend on the mesh.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass
class State:
    """The device's random state.

    Attributes:
        seed: 64 bits.
        counter: how many keys were taken.
    """

    seed: int = 0
    counter: int = 0

    def take(self, count: int) -> np.ndarray:
        """Reserve `count` keys; returns the (low seed, high seed, counter) input of a program."""
        words = np.array(
            [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, self.counter & 0xFFFFFFFF],
            np.uint32,
        )
        self.counter += count
        return words


STATE = State()


def manual_seed(seed: int) -> None:
    """Restart the stream of random numbers of the `jax` device.

    Args:
        seed: any integer; its low 64 bits count.
    """
    STATE.seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    STATE.counter = 0


def keys(words: jax.Array):
    """Endless keys from a program's random input (a uint32 array of shape (3,))."""
    base = jax.random.fold_in(jax.random.key(words[0]), words[1])
    drawn = 0
    while True:
        yield jax.random.fold_in(base, words[2] + np.uint32(drawn))
        drawn += 1


def scalar_dtype() -> np.dtype:  # noqa: N802
    """The dtype of lifted floats: the widest that JAX keeps."""
    return np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)
