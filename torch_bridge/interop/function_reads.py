"""The Python state that a JAX function reads, compared before a trace of it is used again.

JAX traces a function once for each shape and dtype, and what the function closes over is a constant
of that trace. Code that torch calls is expected to see the present values of its closure, its
globals and its objects, so a trace is used for as long as all of those are unchanged:

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

MAX_VERSIONS = 8
"""How many states of a function's reads are kept; the least recently used is dropped."""


class Reads:
    """The reads of a function.

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
        """The version of the present state; a trace is valid for the version it was made with.

        A step that is being captured reads the same.
        """
        self._include_in_active()
        for version in reversed(self._guards):
            if self._guards[version].check():
                self._guards[version] = self._guards.pop(version)  # last again
                return version
        return self._version

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the function is traced, for the present version."""
        version = self.version()
        with executed_code.ExecutedCode() as executed:
            yield
        self._executed.include(executed)
        walk = ObjectWalk(self._executed)
        walk.walk(self.function, self._name)
        walk.walk_globals(self._executed.codes)
        self._executed.sources = [
            CallResult(functools.partial(_elements, tensor), path)
            for tensor, path in walk.tensors.values()
        ]
        self._guards[version] = Guard([*walk.sources, *self._executed.sources])
        self._include_in_active()
        self._version = max(self._version, version + 1)
        while len(self._guards) > MAX_VERSIONS:
            del self._guards[next(iter(self._guards))]

    def _include_in_active(self) -> None:
        around = executed_code.active()
        if around is not None:
            around.include(self._executed)


def _elements(tensor: torch.Tensor) -> Any:
    """A key that changes whenever the elements of a tensor may have changed."""
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return tensor._storage.value
    if tensor.is_inference():
        return object()  # torch counts no writes to it
    memory = (tensor.data_ptr(), writes(tensor))
    if tensor.device.type == "cpu" and tensor.nbytes <= LARGEST_ARRAY:
        return (*memory, to_numpy(tensor.detach()).tobytes())  # writes to `.data` are not counted
    return memory
