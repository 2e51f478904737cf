"""The random state of the `jax` device: seeds and counters.

Every random operation takes the key `fold_in(key(seed), counter)` and moves the counter by one.
Seed and counter are inputs of compiled programs, so a program is reused for fresh numbers; and
JAX's keys are partitionable, so the numbers do not depend on the mesh.

The device has one state, which `torch.manual_seed` seeds; each `Generator` has one of its own.

>>> own = RandomState(seed=7)
>>> with drawing_from(own):
...     take(recorder())
(7, 0, 0)
>>> own.counter
1
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator

import jax
import numpy as np

from .recorder import Recorder, recorder

Word = tuple[int, int, int]
"""Low and high half of a seed, and a counter: the input of a key."""

_LOW = 0xFFFFFFFF
_SEEDINGS = itertools.count(1)
_MOVING = threading.RLock()


@dataclasses.dataclass(eq=False)
class RandomState:
    """The position in a stream of random numbers.

    Attributes:
        seed: 64 bits.
        counter: how many keys were taken.
        seeding: another number after each `manual_seed`.
        first_seeding: what `seeding` was at first.
    """

    seed: int = 0
    counter: int = 0
    seeding: int = dataclasses.field(default_factory=lambda: next(_SEEDINGS))

    def __post_init__(self) -> None:
        """Remember when it was made."""
        self.first_seeding = self.seeding

    def word(self, offset: int = 0) -> Word:
        """The key `offset` places from here."""
        return (self.seed & _LOW, self.seed >> 32, (self.counter + offset) & _LOW)

    def manual_seed(self, seed: int) -> None:
        """Start anew; the low 64 bits of `seed` count."""
        self._go_to(int(seed) & 0xFFFFFFFFFFFFFFFF, 0, next(_SEEDINGS))

    def to_bytes(self) -> bytes:
        """Seed and counter as 16 bytes."""
        mark = recorder().mark
        if mark is not None:
            mark.seedings[self, self.seed, self.counter] = self.seeding
        return self.seed.to_bytes(8, "little") + self.counter.to_bytes(8, "little")

    def from_bytes(self, raw: bytes) -> None:
        """Go on where `to_bytes` was called."""
        seed = int.from_bytes(raw[:8], "little")
        counter = int.from_bytes(raw[8:16], "little")
        mark = recorder().mark
        state = None if mark is None else mark.seedings.get((self, seed, counter))
        self._go_to(seed, counter, next(_SEEDINGS) if state is None else state)

    def _go_to(self, seed: int, counter: int, seeding: int) -> None:
        mark = recorder().mark
        with _MOVING:
            if mark is not None:
                mark.record_start(self)
            self.seed, self.counter, self.seeding = seed, counter, seeding
            if mark is not None:
                mark.record_end(self)

    @property
    def position(self) -> tuple[int, int, int]:
        """Seed, counter and seeding."""
        return (self.seed, self.counter, self.seeding)


STATE = RandomState()
"""The device's own state."""


def take(current: Recorder) -> Word:
    """Reserve the next key."""
    state, mark = current.source or STATE, current.mark
    with _MOVING:
        word = state.word()
        if mark is not None:
            mark.record_key(state, word)
        state.counter += 1
        if mark is not None:
            mark.record_end(state)
    return word


@contextlib.contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Take keys from `state` instead of the device's own."""
    current = recorder()
    before, current.source = current.source, state
    try:
        yield
    finally:
        recorder().source = before


@dataclasses.dataclass(frozen=True)
class Draws:
    """The keys that a captured step takes, relative to the states it finds.

    Attributes:
        words: for each key, a state and how far from its counter; or a `Word`, if the step itself
            seeded the state.
        moves: for each state from before the step, how far its counter moves; or the new seed and
            counter, if the step seeded it.
    """

    words: tuple[tuple[RandomState, int] | Word, ...]
    moves: tuple[tuple[RandomState, int | tuple[int, int]], ...]

    def take(self) -> list[Word]:
        """The keys for one run; moves the states."""
        with _MOVING:
            words = [word if len(word) == 3 else word[0].word(word[1]) for word in self.words]
            for state, move in self.moves:
                if isinstance(move, int):
                    state.counter += move
                else:
                    state.manual_seed(move[0])
                    state.counter = move[1]
        return words


class DrawnKeys:
    """Notes the keys that are taken inside its context, and can put states back.

    What other threads draw from the same states meanwhile is theirs: a state that they moved is not
    put back, so that no key is taken twice.

    Attributes:
        seedings: the seeding of states that were read inside: putting such a state back
            (`fork_rng`, `torch.utils.checkpoint`) is no new seeding.
    """

    def __init__(self) -> None:
        """Nothing noted yet."""
        self.seedings: dict[tuple[RandomState, int, int], int] = {}
        self._begun = next(_SEEDINGS)
        self._starts: dict[RandomState, tuple[int, int, int]] = {}
        self._ends: dict[RandomState, tuple[int, int, int]] = {}
        self._words: list[tuple[RandomState, int] | Word] = []

    def __enter__(self) -> None:
        """Begin to note; a mark around this one does not note what is drawn inside."""
        current = recorder()
        self._around, current.mark = current.mark, self

    def __exit__(self, *exc: object) -> None:
        """End."""
        recorder().mark = self._around

    def record_start(self, state: RandomState) -> None:
        """A state is about to move; one that was made inside is seeded in each run."""
        if state.first_seeding < self._begun:
            self._starts.setdefault(state, state.position)

    def record_end(self, state: RandomState) -> None:
        """A state has moved."""
        self._ends[state] = state.position

    def record_key(self, state: RandomState, word: Word) -> None:
        """A key is about to be taken."""
        self.record_start(state)
        _, counter, seeding = self._starts.get(state, (0, 0, None))
        relative = seeding == state.seeding
        self._words.append((state, state.counter - counter) if relative else word)

    def draws(self) -> Draws:
        """What was taken."""
        moves: list[tuple[RandomState, int | tuple[int, int]]] = []
        for state, (_, counter, seeding) in self._starts.items():
            seed, end, last = self._ends[state]
            if last != seeding:
                moves.append((state, (seed, end)))
            elif end != counter:
                moves.append((state, end - counter))
        return Draws(tuple(self._words), tuple(moves))

    def restore(self) -> None:
        """Put the states back to where they stood."""
        with _MOVING:
            for state, start in self._starts.items():
                if state.position == self._ends[state]:
                    state.seed, state.counter, state.seeding = start


def as_input(words: list[Word]) -> np.ndarray:
    """The random input of a program: uint32, shape (draws, 3)."""
    return np.array(words, np.uint32).reshape(len(words), 3)


def keys(words: jax.Array):
    """The keys of a program's random input, one after the other."""
    return map(key_of, (words[index] for index in range(words.shape[0])))


def key_of(word: jax.Array) -> jax.Array:
    """The key of one row of a program's random input."""
    base = jax.random.fold_in(jax.random.key(word[0]), word[1])
    return jax.random.fold_in(base, word[2])
