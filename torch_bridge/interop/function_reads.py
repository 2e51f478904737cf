"""What a JAX function has read of the objects around it whenever it was traced.

JAX traces a function once for arguments of a kind, and what the function closes over is a constant
of that trace. Code that torch calls is expected to see what its closure, its globals and its
objects hold now, so a trace serves for as long as all of that is as it was:

>>> scale = [2.0]
>>> reads = Reads(lambda x: x * scale[0], "scaled")
>>> first = reads.version()
>>> with reads.tracing():
...     reads.function(1.0)
2.0
>>> reads.version() == first
True
>>> scale[0] = 3.0
>>> reads.version() == first
False
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import writes
from isoshard.torch_bridge.common.exchange import to_numpy
from isoshard.torch_bridge.engine.capture import executed_code
from isoshard.torch_bridge.engine.capture.guard_sources import CallResult
from isoshard.torch_bridge.engine.capture.guards import Guard
from isoshard.torch_bridge.engine.capture.object_walk import LARGEST_ARRAY, ObjectWalk
from isoshard.torch_bridge.engine.recording import lazy_tensor

KEPT = 8
"""How many states of what a function reads are told apart; the one not met for longest goes."""


class Reads:
    """What a function reads.

    NumPy arrays of more than 16 MB, and iterators, are taken as they are at first.

    Args:
        function: of JAX arrays.
        name: for messages.

    Attributes:
        function: as given.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        """Nothing was traced so far."""
        self.function, self._name = function, name
        self._executed = executed_code.ExecutedCode()
        self._guards: dict[int, Guard] = {}
        self._version = 0

    def version(self) -> int:
        """A number for what the function reads as it is now: traces have the number of theirs.

        A step that is being captured reads the same.
        """
        self._tell()
        for number in reversed(self._guards):
            if self._guards[number].check():
                self._guards[number] = self._guards.pop(number)  # last again
                return number
        return self._version

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the function is traced, for the version that was asked for last."""
        number = self.version()
        with executed_code.ExecutedCode() as ran:
            yield
        self._executed.include(ran)
        found = ObjectWalk(self._executed)
        found.walk(self.function, self._name)
        found.walk_globals(self._executed.codes)
        self._executed.sources = [
            CallResult(functools.partial(_elements, tensor), path)
            for tensor, path in found.tensors.values()
        ]
        self._guards[number] = Guard([*found.sources, *self._executed.sources])
        self._tell()
        self._version = max(self._version, number + 1)
        while len(self._guards) > KEPT:
            del self._guards[next(iter(self._guards))]

    def _tell(self) -> None:
        around = executed_code.active()
        if around is not None:
            around.include(self._executed)


def _elements(tensor: torch.Tensor) -> Any:
    """Another object whenever the elements of a tensor may be others."""
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return tensor._storage.value
    if tensor.is_inference():
        return object()  # torch counts no writes to it
    place = (tensor.data_ptr(), writes(tensor))
    if tensor.device.type == "cpu" and tensor.nbytes <= LARGEST_ARRAY:
        return (*place, to_numpy(tensor.detach()).tobytes())  # writes to `.data` are not counted
    return place
