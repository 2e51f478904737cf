"""What torch saves for backward, as arrays that can be handed over and put back.

While a layer runs, `hooks()` catches each tensor that autograd saves. A tensor that views a known
input is remembered as such; the array of any other becomes a residual. Later `provide` says which
arrays stand for inputs and residuals, and the graph runs backwards on those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jax.core import Tracer

from . import base
from .value import Aval, Storage, Value
from .views import Chain


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A view of the array `group[number]`."""

    group: str
    number: int
    whole: Aval
    aval: Aval
    chain: Chain
    offset: int


class Residuals:
    """The tensors saved in one run.

    Args:
        inputs: groups of arrays that need not be kept, because they will be at hand.

    Attributes:
        arrays: those that have to be kept.
    """

    def __init__(self, inputs: Mapping[str, Any]):
        """See the class."""
        self.arrays: list[Any] = []
        self._known = {
            id(array): (group, number)
            for group, arrays in inputs.items()
            for number, array in enumerate(arrays)
        }
        self._used: set[tuple[str, int]] = set()
        self._present: dict[str, Any] = {**inputs, "residual": self.arrays}

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which saved tensors are caught."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def provide(self, arrays: Mapping[str, Any]) -> None:
        """Let `arrays` stand for inputs and residuals from now on."""
        self._present = dict(arrays)

    def used(self, group: str) -> set[int]:
        """Which inputs of a group were saved."""
        return {number for name, number in self._used if name == group}

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, base.LazyTensor):
            return tensor
        storage = tensor._storage
        array = storage.value.array
        place = self._known.get(id(array))
        if place is None:
            place = self._known[id(array)] = ("residual", len(self.arrays))
            self.arrays.append(array)
            storage.value.shared = not isinstance(array, Tracer)
        self._used.add(place)
        offset = int(tensor.storage_offset())
        return _Saved(*place, storage.aval, tensor._aval, tensor._chain, offset)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        storage = Storage(Value.handed(self._present[saved.group][saved.number]), saved.whole)
        return base.new_tensor(saved.aval, storage, saved.chain, saved.offset)
