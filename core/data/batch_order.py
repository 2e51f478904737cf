"""The order of samples as a function of the step, so that a run goes on with the right batch.

>>> order = BatchOrder(10, 4, seed=0)
>>> [order.batch(step).tolist() for step in range(3)]
[[4, 6, 2, 7], [3, 5, 9, 0], [8, 1, 9, 1]]

Every ten numbers are one epoch: each sample comes once before any comes again, and a batch may end
one epoch and begin the next. Nothing is remembered between batches, so there is no position that a
prefetching loader could run ahead of: a checkpoint of step 2 goes on with batch 2.

>>> [batch.tolist() for _, batch in zip(range(1), order.after(2))]
[[8, 1, 9, 1]]

Batches are those of the whole run. Each of several groups of processes takes its rows, and other
numbers of groups after a restart take the same batches otherwise divided:

>>> [order.batch(0, part, 2).tolist() for part in range(2)]
[[4, 6], [2, 7]]
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from isoshard.core.errors import CheckpointError, ShardingError


class BatchOrder:
    """Which samples each batch of a run has; the same in every process.

    Args:
        samples: how many there are, numbered from 0.
        batch: how many a batch of the whole run has.
        seed: of the order; each epoch has another one.
        shuffle: False takes them from 0 on.

    Raises:
        ShardingError: a number is not possible; all are named.

    Example:
        >>> order = BatchOrder(6, 4, shuffle=False)
        >>> rows = np.arange(60).reshape(6, 10)
        >>> loaded = (rows[numbers] for numbers in order.after(1))      # from step 1 on
        >>> next(loaded)[:, 0].tolist()
        [40, 50, 0, 10]
    """

    def __init__(self, samples: int, batch: int, *, seed: int = 0, shuffle: bool = True):
        """See the class."""
        least = {"samples": (samples, 1), "batch": (batch, 1), "seed": (seed, 0)}
        wrong = [
            f"{name}={given!r} is no integer of at least {lowest}"
            for name, (given, lowest) in least.items()
            if not isinstance(given, int) or isinstance(given, bool) or given < lowest
        ]
        if wrong:
            raise ShardingError(f"an order of batches cannot be made so: {'; '.join(wrong)}")
        self.samples, self.size, self.seed, self.shuffle = samples, batch, seed, shuffle
        self._epoch = functools.lru_cache(2)(self._of_epoch)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> np.ndarray:
        """The numbers of the samples of one batch.

        Args:
            step: number of the batch, from 0 on; of any epoch.
            part: whose rows: of the equal parts of the batch, in order.
            parts: how many parts there are: groups of processes that read alike.

        Returns:
            int64, of shape (batch // parts,).

        Raises:
            ShardingError: the parts do not divide the batch, or there is no such part or step.
        """
        if step < 0 or not 0 <= part < parts or self.size % parts:
            raise ShardingError(
                f"there is no part {part} of {parts} of batch {step} of {self.size} samples; "
                "batches are numbered from 0 on, and the parts divide them evenly"
            )
        rows = self.size // parts
        first = step * self.size + part * rows
        places = np.arange(first, first + rows)
        epochs, within = places // self.samples, places % self.samples
        found = np.empty(rows, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            found[here] = self._epoch(epoch)[within[here]]
        return found

    def after(self, step: int, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """The batches from one step on, without an end; torch's `batch_sampler` takes them too.

        Args:
            step: how many batches the run has had.
            part: as for `batch`.
            parts: likewise.

        Yields:
            The samples of each batch, as `batch` gives them.
        """
        while True:
            yield self.batch(step, part, parts)
            step += 1

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint has to keep, besides the step, to find the same order again.

        Args:
            step: how many batches the run has had.

        Returns:
            Numbers, for `iso.save`; `check` compares them.
        """
        epoch = self._epoch(step * self.size // self.samples)
        given = {"samples": self.samples, "batch": self.size, "seed": self.seed}
        return {**given, "shuffle": self.shuffle, "crc32": zlib.crc32(epoch.tobytes())}

    def check(self, state: Mapping[str, Any], step: int) -> None:
        """Refuse to go on in another order than that in which the run began.

        Args:
            state: what `state_dict` gave at this step.
            step: how many batches the run has had.

        Raises:
            CheckpointError: samples would come twice, or not at all; all that differs is named.

        Example:
            >>> order = BatchOrder(10, 4)
            >>> order.check(BatchOrder(10, 5).state_dict(2), 2)
            Traceback (most recent call last):
                ...
            isoshard.core.errors.CheckpointError: this order of batches is not the one that the \
checkpoint of step 2 was saved with: batch is 4, and was 5. Samples would come twice or not at \
all; give what was given then, or begin a new run
        """
        mine = self.state_dict(step)
        wrong = [
            f"{name} is {mine[name]}, and was {state.get(name)}"
            for name in mine
            if name != "crc32" and mine[name] != state.get(name)
        ]
        if not wrong and mine["crc32"] != state.get("crc32"):
            wrong = [f"NumPy {np.__version__} shuffles otherwise than the one that was used then"]
        if wrong:
            raise CheckpointError(
                f"this order of batches is not the one that the checkpoint of step {step} was "
                f"saved with: {'; '.join(wrong)}. Samples would come twice or not at all; give "
                "what was given then, or begin a new run"
            )

    def __repr__(self) -> str:
        """As it was made."""
        more = "" if self.shuffle else ", shuffle=False"
        return f"BatchOrder({self.samples}, {self.size}, seed={self.seed}{more})"

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)
