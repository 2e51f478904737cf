"""Step counts of optimizers, added to and read in memory.

`torch.optim` keeps one number for each parameter in a CPU tensor. Through torch, adding one to it
and reading it take a microsecond together, which is most of what a replay of AdamW takes beside its
program. Here both take a tenth of that, and give the same bits.

>>> counts = StepCounts([torch.tensor(3.0), torch.tensor(4.0)])
>>> add, read = counts.adding([0, 1], 1), counts.reading([0, 1])
>>> add()
>>> read()
[4.0, 5.0]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.runtime.scattered import Scattered

_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def is_count(tensor: Any) -> bool:
    """Whether a tensor is one that `StepCounts` takes: one number on the CPU, without autograd."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _NUMPY
        and tensor.dim() == 0
        and not (tensor.requires_grad or tensor.is_inference() or tensor.is_neg())
        and tensor.data_ptr() != 0
        and tensor.data_ptr() % tensor.element_size() == 0
    )


def is_increment(number: Any, tensor: torch.Tensor) -> bool:
    """Whether a number is added to a count as Python adds it.

    Args:
        number: a Python number, or a CPU tensor with one.
        tensor: the count.
    """
    if isinstance(number, torch.Tensor):
        return is_count(number) and number.dtype == tensor.dtype
    return type(number) in (int, float)


class StepCounts:
    """The memory of CPU tensors.

    Args:
        tensors: `is_count` of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """See the class."""
        self.tensors = list(tensors)
        self._addresses = list(map(_ADDRESS, self.tensors))
        self._dtypes = list(map(_DTYPE, self.tensors))

    def are_in_place(self) -> bool:
        """Whether the tensors have the memory that they had, and one number each."""
        return (
            list(map(_ADDRESS, self.tensors)) == self._addresses
            and list(map(_DTYPE, self.tensors)) == self._dtypes
            and not any(map(_DIM, self.tensors))
        )

    def adding(self, places: Sequence[int], number: float) -> Callable[[], None]:
        """A function that adds a number, rounded to their dtype first, to some.

        Args:
            places: which, each once, of one dtype.
            number: `is_increment` of each.
        """
        rounded = torch.tensor([number], dtype=self._dtypes[places[0]], device="cpu").numpy()
        return self._adding(places, lambda: rounded)

    def adding_one(self, places: Sequence[int], other: int) -> Callable[[], None]:
        """A function that adds one of the tensors, as it is then, to others of the same dtype.

        Args:
            places: to which, each once.
            other: which is added; none of these.
        """
        return self._adding(places, self._cells([other]).read)

    def _adding(
        self, places: Sequence[int], number: Callable[[], np.ndarray]
    ) -> Callable[[], None]:
        cells, tensors = self._cells(places), [self.tensors[place] for place in places]
        note = torch.autograd.graph.increment_version

        def add() -> None:
            with np.errstate(over="ignore"):  # infinite, as in torch
                cells.write(cells.read() + number())
            note(tensors)

        return add

    def reading(self, places: Sequence[int]) -> Callable[[], list[Any]]:
        """A function that gives the present numbers of some."""
        if len({self._dtypes[place] for place in places}) > 1:
            each = [self.reading([place]) for place in places]
            return lambda: [read()[0] for read in each]
        cells = self._cells(places)
        return lambda: cells.read().tolist()

    def _cells(self, places: Sequence[int]) -> Scattered:
        addresses = [self._addresses[place] for place in places]
        return Scattered(addresses, _NUMPY[self._dtypes[places[0]]])


_ADDRESS = torch.Tensor.data_ptr
_DTYPE = operator.attrgetter("dtype")
_DIM = torch.Tensor.dim
