"""Where a captured program finds its inputs, and where its results go.

A replay runs no Python code of the step, so what the step touched is written down once: an input is
the memory of an argument, of a gradient, or a `Storage` that outlives the step; a result is written
to such memory, or becomes a new tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.engine.values.views import Chain


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the step, or its memory.

    Attributes:
        number: which tensor argument, in flattened order.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The `.grad` that an owner has before the step, or its memory.

    Attributes:
        number: which owner.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """A tensor that a name holds which the step binds anew, or its memory.

    Attributes:
        number: which of these tensors.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class HostOperand:
    """A CPU tensor that goes to the device in each run.

    Attributes:
        read: gives the tensor.
    """

    read: Callable[[], torch.Tensor]


Place = Argument | Gradient | Bound | Storage


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that views memory which the caller holds.

    Attributes:
        place: whose memory.
        aval: its size, stride and dtype.
        chain: how it views the memory.
        offset: its storage offset.
        differentiable: whether it came out of the step with an autograd graph.
    """

    place: Argument | Gradient | Bound
    aval: Aval
    chain: Chain
    offset: int
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor made anew in each run, with memory of its own.

    Attributes:
        number: which result of the program.
        aval: its size, stride and dtype.
        differentiable: whether it came out of the step with an autograd graph.
    """

    number: int
    aval: Aval
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """A tensor made anew that shares its memory with others made in the same run.

    Attributes:
        memory: which memory, counted over the run.
        number: the result of the program that is the whole memory.
        whole: the aval of the memory.
        aval: the tensor's size, stride and dtype.
        chain: how it views the memory.
        offset: its storage offset.
        differentiable: whether it came out of the step with an autograd graph.
    """

    memory: int
    number: int
    whole: Aval
    aval: Aval
    chain: Chain
    offset: int
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class New:
    """One of the tensors made anew, `Computed` or `SharedMemory`.

    Attributes:
        number: which of them.
    """

    number: int


Owner = torch.Tensor | Argument
"""Who has a gradient: a parameter, or an argument that requires one."""


class Scene:
    """The tensors of one call, by the names that a captured program has for them.

    Args:
        arguments: the call's tensor arguments.
        owners: who may have gradients.
        bound: what the names hold that the program binds anew.
    """

    def __init__(
        self,
        arguments: Sequence[lazy_tensor.LazyTensor],
        owners: Sequence[Owner],
        bound: Sequence[lazy_tensor.LazyTensor],
    ):
        """See the class."""
        self.arguments = arguments
        self._bound = bound
        self._owners = owners
        self._gradients: dict[int, Any] = {}

    def owner(self, number: int) -> torch.Tensor:
        """Who has a gradient."""
        owner = self._owners[number]
        return self.arguments[owner.number] if isinstance(owner, Argument) else owner

    def tensor(self, place: Argument | Gradient | Bound) -> Any:
        """The tensor at a place; a gradient is the one found when first asked for."""
        if isinstance(place, Argument):
            return self.arguments[place.number]
        if isinstance(place, Bound):
            return self._bound[place.number]
        if place.number not in self._gradients:
            self._gradients[place.number] = self.owner(place.number).grad
        return self._gradients[place.number]

    def storage(self, place: Place) -> Storage:
        """The memory at a place."""
        return place if isinstance(place, Storage) else self.tensor(place)._storage
