"""The random state of the `jax` device: a seed and a counter.

Every random operation takes the key `fold_in(key(seed), counter)` and moves the counter by one.
Seed and counter are inputs of compiled programs, so a program is reused for fresh numbers; and
JAX's keys are partitionable, so the numbers do not depend on the mesh.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

Word = tuple[int, int, int]
"""Low and high half of a seed, and a counter: what a key is made of."""


@dataclasses.dataclass
class State:
    """The device's random state.

    Attributes:
        seed: 64 bits.
        counter: how many keys were taken.
    """

    seed: int = 0
    counter: int = 0

    def take(self) -> Word:
        """Reserve one key."""
        counter = self.counter
        self.counter += 1
        return (self.seed & _LOW, self.seed >> 32, counter & _LOW)

    def restore(self, other: State) -> None:
        """Go on from another state."""
        self.seed = other.seed
        self.counter = other.counter


_LOW = 0xFFFFFFFF
STATE = State()


@dataclasses.dataclass(frozen=True)
class Draws:
    """The keys that a captured step takes, relative to the state it finds.

    Attributes:
        offsets: for each key, how far its counter is past the state's; or a whole `Word`, if the
            step seeds anew.
        advance: how far the step moves the counter.
        final: the state afterwards, if the step seeds anew.
    """

    offsets: tuple[int | Word, ...]
    advance: int
    final: State | None

    @staticmethod
    def relative(words: list[Word], start: State) -> Draws:
        """Describe the keys taken since `start`."""
        seed = (start.seed & _LOW, start.seed >> 32)
        offsets = tuple(w[2] - start.counter if w[:2] == seed else w for w in words)
        reseeded = STATE.seed != start.seed
        final = State(STATE.seed, STATE.counter) if reseeded else None
        return Draws(offsets, STATE.counter - start.counter, final)

    def take(self) -> list[Word]:
        """The keys for one run; moves the device's state."""
        low, high, counter = STATE.seed & _LOW, STATE.seed >> 32, STATE.counter
        words = [
            (low, high, (counter + one) & _LOW) if isinstance(one, int) else one
            for one in self.offsets
        ]
        STATE.counter += self.advance
        if self.final is not None:
            STATE.restore(self.final)
        return words


def manual_seed(seed: int) -> None:
    """Restart the stream of random numbers of the `jax` device.

    Args:
        seed: any integer; its low 64 bits count.
    """
    STATE.seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    STATE.counter = 0


def as_input(words: list[Word]) -> np.ndarray:
    """The random input of a program: uint32, shape (draws, 3)."""
    return np.array(words, np.uint32).reshape(len(words), 3)


def keys(words: jax.Array):
    """The keys of a program's random input, one after the other."""
    for number in range(words.shape[0]):
        base = jax.random.fold_in(jax.random.key(words[number, 0]), words[number, 1])
        yield jax.random.fold_in(base, words[number, 2])


def scalar_dtype() -> np.dtype:
    """The dtype of lifted floats: the widest that JAX keeps."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
