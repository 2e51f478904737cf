"""What recorded code takes from around it, besides its arguments."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.engine.values.views import Chain

from .subprogram import Subprogram
from .traced_vjp import TracedVjp


@dataclasses.dataclass
class ClosedOver:
    """What a recorded run closes over.

    Attributes:
        originals: tensors from around that require a gradient.
        frozen: tensors from around that required none.
        outside: memory from around that is read.
        constants: tensors that the code brought from the host.
        scalars: its lifted floats.
        written: memory from around that is written to.
    """

    originals: list[Any]
    frozen: list[weakref.ref[lazy_tensor.LazyTensor]]
    outside: list[Storage]
    constants: list[Any]
    scalars: list[Any]
    written: list[Storage]

    @classmethod
    def of(cls, run: TracedVjp, *, differentiable: bool) -> ClosedOver:
        """Take it from a run, which is then over: no more subprograms can be taken from it.

        Args:
            run: some code.
            differentiable: whether gradients of `originals` are required.
        """
        recorded = run.subtrace
        result = cls(
            [original for original, _ in recorded.aliases] if differentiable else [],
            recorded.frozen,
            recorded.outside,
            recorded.constant_tensors(),
            recorded.scalars,
            [storage for storage, _ in run.written],
        )
        recorded.forget()
        return result

    def is_current(self) -> bool:
        """Whether the tensors from around require gradients as they did when the code ran."""
        thawed = (tensor() for tensor in self.frozen)
        return all(original.requires_grad for original in self.originals) and not any(
            original is not None and original.requires_grad for original in thawed
        )

    def is_of_this_call(self) -> bool:
        """Whether a learning rate of a capture is in it, or a tensor that was computed before."""
        return any(original.grad_fn is not None for original in self.originals) or any(
            isinstance(scalar, torch.SymFloat) for scalar in self.scalars
        )

    def floats(self, shard: Subprogram | None) -> list[Any]:
        """The lifted floats that a subprogram takes."""
        return [] if shard is None else [self.scalars[scalar] for scalar in shard.scalars]

    def tensors(self) -> list[Any]:
        """What is read: `outside` and `constants`."""
        return [*map(storage_tensor, self.outside), *self.constants]

    def write(self, values: Iterable[Any]) -> None:
        """Give the memory that is `written` its new values."""
        for storage, new in zip(self.written, values, strict=True):
            lazy_tensor.write(storage_tensor(storage), new)


def storage_tensor(storage: Storage) -> lazy_tensor.LazyTensor:
    """All of a storage, as a tensor."""
    return lazy_tensor.new_tensor(storage.aval, storage, Chain.root(storage.aval))
