"""A random program: lines of Python, and what running them leaves behind.

>>> program = Program((Line("a = torch.ones(2, 3)"), Line("b = a.t()"), Line("b.add_(1)")))
>>> sorted(program.run("cpu").facts)
['a', 'b']
>>> program.run("cpu").facts["a"].tensor.sum()
tensor(12.)
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from . import vocabulary


@dataclasses.dataclass(frozen=True)
class Line:
    """One statement.

    Attributes:
        text: the statement.
        raises: the exception with which the CPU refuses it, or None.
    """

    text: str
    raises: type[Exception] | None = None


@dataclasses.dataclass(frozen=True)
class Fact:
    """A value that a program left.

    Attributes:
        tensor: a copy of the elements, or None.
        shown: everything else that both devices must agree on.
    """

    tensor: torch.Tensor | None
    shown: Any


@dataclasses.dataclass
class Run:
    """What one run of a program left.

    Attributes:
        facts: by name; on the `jax` device they may be recorded and not computed yet.
        fault: a line that raised and should not have, or the other way round; or None.
    """

    facts: dict[str, Fact]
    fault: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Lines to run one after the other.

    Attributes:
        lines: the statements.
    """

    lines: tuple[Line, ...]

    def run(self, device: str, between: Callable[[], Any] | None = None) -> Run:
        """Run every line on a device; stops at the first line that is refused unexpectedly.

        Args:
            device: where the tensors are made.
            between: called after each line.
        """
        scope = vocabulary.names(device)
        given = set(scope)
        fault = None
        for line in self.lines:
            fault = attempt(line, scope)
            if fault is not None:
                break
            if between is not None:
                between()
        return Run(dict(self.facts(scope, given)), fault)

    @staticmethod
    def facts(scope: dict[str, Any], given: set[str]) -> Iterator[tuple[str, Fact]]:
        """What the variables of a program hold, without those that were `given` to it."""
        for name, value in scope.items():
            if name not in given and name[0] != "_":
                yield from _facts(name, value)

    def __str__(self) -> str:
        """The lines, with what the CPU refuses."""
        return "\n".join(
            line.text + (f"  # {line.raises.__name__}" if line.raises else "")
            for line in self.lines
        )


def attempt(line: Line, scope: dict[str, Any]) -> str | None:
    """Run a line; says what is wrong if it raises and should not, or does not and should."""
    try:
        execute(line.text, scope)
    except Exception as error:
        if line.raises is None:
            return f"`{line.text}` raises {type(error).__name__}: {error}"
        if not isinstance(error, line.raises):
            return (
                f"`{line.text}` raises {type(error).__name__} instead of "
                f"{line.raises.__name__}: {error}"
            )
        return None
    if line.raises is not None:
        return f"`{line.text}` does not raise {line.raises.__name__}"
    return None


def execute(text: str, scope: dict[str, Any]) -> None:
    """Run a line; torch warns of what some random programs do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(_compiled(text), scope)


@functools.lru_cache(4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<program>", "exec", dont_inherit=True)


def _facts(name: str, value: Any) -> Iterator[tuple[str, Fact]]:
    if isinstance(value, nn.Module):
        for part, tensor in value.state_dict(keep_vars=True).items():
            yield from _facts(f"{name}.{part}", tensor)
    elif isinstance(value, torch.Tensor):
        yield name, _tensor_fact(value)
        if is_leaf(value) is True and value.grad is not None:
            yield f"{name}.grad", _tensor_fact(value.grad)
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        for number, item in enumerate(value):
            yield from _facts(f"{name}[{number}]", item)
    else:
        yield name, Fact(None, value)


def _tensor_fact(tensor: torch.Tensor) -> Fact:
    shown = {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "stride": _promised_stride(tensor),
        "offset": tensor.storage_offset() if tensor._is_view() else 0,
    }
    if (
        tensor.is_floating_point() or tensor.is_complex()
    ):  # integers: torch itself is not of one mind
        shown |= {"requires_grad": tensor.requires_grad, "is_leaf": is_leaf(tensor)}
    return Fact(tensor.detach().resolve_conj().resolve_neg().clone(), shown)


def is_leaf(tensor: torch.Tensor) -> bool | str:
    """Whether it is one; "refused" for a view of several that torch took out of the graph."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return "refused"


def _promised_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that lead from one element to another."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if extent > 1 else 0 for extent, step in pairs) if tensor.numel() else ()
