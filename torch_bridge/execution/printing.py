"""Printing values from inside a step.

A value that is printed is one more result of the program, and is printed when the program has run.
So the order is that of the calls, on any number of devices, and nothing calls back from the device.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.operators.reading import to_host
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.recording.tape import Tape


@dataclasses.dataclass
class Printed:
    """A line to print after the run of a program.

    Attributes:
        text: the format.
        arguments: what is formatted: tensors on the device, and anything else.
    """

    text: str
    arguments: Sequence[Any]

    @property
    def tensors(self) -> list[lazy_tensor.LazyTensor]:
        """The tensors among the arguments."""
        return [each for each in self.arguments if isinstance(each, lazy_tensor.LazyTensor)]

    def show(self, tensors: Sequence[lazy_tensor.LazyTensor] | None = None) -> None:
        """Print it.

        Args:
            tensors: those of another run, in place of its own.
        """
        values = iter(self.tensors if tensors is None else tensors)
        shown: list[Any] = []
        for argument in self.arguments:
            if isinstance(argument, lazy_tensor.LazyTensor):
                tensor = next(values)
                tape = tensor._storage.value.tape
                failed = tape is not None and tape.failed
                shown.append("<not computed>" if failed else to_host(tensor))
            else:
                shown.append(argument)
        builtins.print(self.text.format(*shown))


def print(text: str, *arguments: Any) -> None:
    """Print values of tensors from inside a step, in each run, without ending its program.

    The line is printed when the program has run that computes the values: at the end of each call
    of a compiled step, and at the next `sync` (or when a value is read) of what is recorded lazily.
    The device is waited for.

    Args:
        text: as for `str.format`, `"loss {:.3f} of {}"`.
        arguments: tensors on the `jax` device, of any shape; and numbers and strings, which a
            compiled step prints as they were when it was captured.

    Raises:
        TypeError: `text` is no string, or an argument is a tensor of another device.
        IndexError: `text` has more fields than there are arguments.
        CaptureError: it is in the body of a loop or branch that is one operation of the program
            (`scan_layers`, `torch.cond`), or in what `jax_function` traces.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> @xs.compile
        ... def step(x):
        ...     h = x * 2
        ...     xs.print("sum of h: {:.1f}", h.sum())
        ...     return h + 1
        >>> y = step(torch.ones(3, device="jax"))
        sum of h: 6.0
        >>> y = step(y)
        sum of h: 18.0
    """
    if not isinstance(text, str):
        raise TypeError(
            f"xs.print takes a format first, and got a {type(text).__name__}: "
            'xs.print("h is {}", h)'
        )
    text.format(*[0.0 if isinstance(each, torch.Tensor) else each for each in arguments])
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not isinstance(argument, lazy_tensor.LazyTensor):
            raise TypeError(
                f"xs.print got a tensor on {argument.device}: print it as it is, with print(), or "
                'move it with .to("jax") before the step'
            )
    current = recorder()
    with torch.no_grad():
        kept = [
            each.detach().clone() if isinstance(each, lazy_tensor.LazyTensor) else each
            for each in arguments
        ]
    if isinstance(current, Tape):
        current = recorder()  # the clone may have begun another tape
        assert isinstance(current, Tape)
        if not current.plans:
            current.printed.append(Printed(text, kept))
    else:
        raise CaptureError(
            f"{metrics.user_location()}: xs.print is in code that becomes one operation of the "
            "program (the body of a loop or a branch, or what iso.jax_function traces), which has "
            "no values to print. Print what it takes or returns, outside; or use JAX's own: "
            'iso.torch_function(lambda h: (jax.debug.print("{}", h), h)[1])(h), and go on with '
            "its result."
        )
