"""Programs that bring their own derivatives, for many examples at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .differentiable_programs import Derivative, Program


@dataclasses.dataclass(frozen=True)
class AddedAxis:
    """An axis that `jax.vmap` adds.

    Attributes:
        size: how many examples there are.
        options: its names, as `jax.vmap` takes them.
    """

    size: int
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, axis: Any) -> AddedAxis:
        """As a rule for batches is given it."""
        names = {"spmd_axis_name": axis.spmd_name}
        if isinstance(axis.name, str):
            names["axis_name"] = axis.name
        return cls(axis.size, tuple(names.items()))

    def over(self, function: Any, axes: Sequence[Any]) -> Any:
        """A function of all examples."""
        return jax.vmap(function, in_axes=tuple(axes), axis_size=self.size, **dict(self.options))


class BatchedProgram:
    """A program for many operands at once.

    Args:
        inner: the program.
        mapped: which operands have an axis of examples, the first.
        axis: that axis.
    """

    def __init__(self, inner: Program, mapped: tuple[bool, ...], axis: AddedAxis):
        """See the class."""
        self._inner, self._mapped, self._axis = inner, mapped, axis
        self._linears: dict[tuple[int, ...], Derivative] = {}

    def __call__(self, *operands: Any) -> list[Any]:
        """The results of all examples."""
        return self._axis.over(self._inner, _axes(self._mapped))(*operands)

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """With respect to some operands."""
        if which not in self._linears:
            inner = self._inner.linear(which)
            self._linears[which] = BatchedDerivative(inner, self._mapped, None, self._axis)
        return self._linears[which]

    def spread(self, index: int, tangent: Any) -> Any:
        """Of an operand that all examples share, a tangent for each."""
        inner = functools.partial(self._inner.spread, index)
        if self._mapped[index]:
            return self._axis.over(inner, [0])(tangent)
        tangent_of_row = inner(tangent)
        return jnp.broadcast_to(tangent_of_row, (self._axis.size, *tangent_of_row.shape))


class BatchedDerivative:
    """A `Derivative` for many operands at once.

    Args:
        inner: of one example.
        mapped: which operands have an axis of examples.
        kept: which residuals have; None for all.
        axis: that axis.
    """

    def __init__(
        self,
        inner: Derivative,
        mapped: tuple[bool, ...],
        kept_residuals: tuple[bool, ...] | None,
        axis: AddedAxis,
    ):
        """See the class."""
        self._inner, self._mapped, self._kept, self._axis = inner, mapped, kept_residuals, axis
        self.count, self.which = inner.count, inner.which
        self.with_cotangent = inner.with_cotangent

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results and residuals of all examples."""
        return self._axis.over(self._inner.forward, _axes(self._mapped))(*operands)

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of all examples, apart also where they share an operand."""
        kept = (True,) * len(residuals) if self._kept is None else self._kept
        axes = [_axes(self._mapped), _axes(kept), [0] * len(cotangents)]
        run = self._axis.over(self._inner.backward, axes)
        return run(list(operands), list(residuals), list(cotangents))

    @functools.cached_property
    def vjp(self) -> Program:
        """The backward pass as a program."""
        mapped = (*self._mapped, *(True for _ in self.with_cotangent))
        return BatchedProgram(self._inner.vjp, mapped, self._axis)


def _axes(mapped: Sequence[bool]) -> list[Any]:
    return [0 if is_mapped else None for is_mapped in mapped]
