"""The order of samples as a function of the step, so that a run resumes with the right batch.

>>> order = BatchOrder(10, 4, seed=0)
>>> [order.batch(step).tolist() for step in range(3)]
[[4, 6, 2, 7], [3, 5, 9, 0], [8, 1, 9, 1]]

Every ten samples are one epoch: each sample occurs once before any occurs again, and a batch may
span two epochs. The order has no state, so a prefetching loader cannot run ahead of a checkpoint: a
run restored at step 2 resumes with batch 2.

>>> [batch.tolist() for _, batch in zip(range(1), order.after(2))]
[[8, 1, 9, 1]]

Batches are global. Each of several groups of processes reads its rows, and another number of groups
after a restart divides the same batches differently:

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
    """The samples of each batch of a run; the same in every process.

    Args:
        samples: the number of samples.
        batch: the global batch size.
        seed: of the order; each epoch has another order.
        shuffle: False takes samples in order.

    Raises:
        ShardingError: an argument is invalid; all are named.

    Example:
        >>> order = BatchOrder(6, 4, shuffle=False)
        >>> rows = np.arange(60).reshape(6, 10)
        >>> loaded = (rows[samples] for samples in order.after(1))      # from step 1 on
        >>> next(loaded)[:, 0].tolist()
        [40, 50, 0, 10]
    """

    def __init__(self, samples: int, batch: int, *, seed: int = 0, shuffle: bool = True):
        """See the class."""
        least = {"samples": (samples, 1), "batch": (batch, 1), "seed": (seed, 0)}
        wrong = [
            f"{name}={value!r} is no integer of at least {lowest}"
            for name, (value, lowest) in least.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest
        ]
        if wrong:
            raise ShardingError(f"the order of batches is invalid: {'; '.join(wrong)}")
        self.samples, self.size, self.seed, self.shuffle = samples, batch, seed, shuffle
        self._epoch = functools.lru_cache(2)(self._of_epoch)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> np.ndarray:
        """The indices of the samples of one batch.

        Args:
            step: index of the batch, over all epochs.
            part: index of this process's group, whose rows are returned.
            parts: the number of groups of processes, each of which reads its own rows.

        Returns:
            int64, of shape (batch // parts,).

        Raises:
            ShardingError: `parts` does not divide the batch, or there is no such part or step.
        """
        if step < 0 or not 0 <= part < parts or self.size % parts:
            raise ShardingError(
                f"there is no part {part} of {parts} of batch {step} of {self.size} samples; "
                "batches are numbered from 0 on, and the parts divide them evenly"
            )
        rows = self.size // parts
        first = step * self.size + part * rows
        positions = np.arange(first, first + rows)
        epochs, within = positions // self.samples, positions % self.samples
        samples = np.empty(rows, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            in_epoch = epochs == epoch
            samples[in_epoch] = self._epoch(epoch)[within[in_epoch]]
        return samples

    def after(self, step: int, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """The batches from one step on, endlessly; also for torch's `batch_sampler`.

        Args:
            step: the number of batches before.
            part: as for `batch`.
            parts: as for `batch`.

        Yields:
            The samples of each batch, as `batch` gives them.
        """
        while True:
            yield self.batch(step, part, parts)
            step += 1

    def state_dict(self, step: int) -> dict[str, Any]:
        """The state to save in a checkpoint, besides the step, to verify the order on restore.

        Args:
            step: the number of batches before.

        Returns:
            Numbers, for `iso.save`; `check` compares them.
        """
        epoch = self._epoch(step * self.size // self.samples)
        options = {"samples": self.samples, "batch": self.size, "seed": self.seed}
        return {**options, "shuffle": self.shuffle, "crc32": zlib.crc32(epoch.tobytes())}

    def check(self, state: Mapping[str, Any], step: int) -> None:
        """Raise if this order differs from the one that the run began with.

        Args:
            state: the `state_dict` of this step.
            step: the number of batches before.

        Raises:
            CheckpointError: samples would repeat or be skipped; all differences are named.

        Example:
            >>> order = BatchOrder(10, 4)
            >>> order.check(BatchOrder(10, 5).state_dict(2), 2)
            Traceback (most recent call last):
                ...
            isoshard.core.errors.CheckpointError: this order of batches is not the one that the \
checkpoint of step 2 was saved with: batch is 4, and was 5. Samples would repeat or be \
skipped; use the same arguments, or begin a new run
        """
        current = self.state_dict(step)
        wrong = [
            f"{name} is {current[name]}, and was {state.get(name)}"
            for name in current
            if name != "crc32" and current[name] != state.get(name)
        ]
        if not wrong and current["crc32"] != state.get("crc32"):
            wrong = [f"NumPy {np.__version__} shuffles differently than the version used then"]
        if wrong:
            raise CheckpointError(
                f"this order of batches is not the one that the checkpoint of step {step} was "
                f"saved with: {'; '.join(wrong)}. Samples would repeat or be skipped; use the "
                "same arguments, or begin a new run"
            )

    def __repr__(self) -> str:
        """The constructor's call."""
        more = "" if self.shuffle else ", shuffle=False"
        return f"BatchOrder({self.samples}, {self.size}, seed={self.seed}{more})"

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)
