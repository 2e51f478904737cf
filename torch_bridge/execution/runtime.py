"""Execution of recorded operations, and of captured steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import jax

from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.capture.assemble import Repeat, checked_repeat
from isoshard.torch_bridge.engine.capture.step import CompiledStep
from isoshard.torch_bridge.engine.compiling import input_placement, program
from isoshard.torch_bridge.engine.recording.deferred_checks import raise_failed
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.value import Storage

from . import closures


def sync(*, wait: bool = False) -> None:
    """Execute every operation recorded so far as one XLA program.

    Then the functions run that wait for the end of a step: see torch_xla's `add_step_closure`.

    Args:
        wait: also wait until the devices have finished.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = torch.ones(2, device="jax") + 1
        >>> xs.sync()
        >>> x
        tensor([2., 2.], device='jax:0')
    """
    if recorder().plans:  # there is nothing to execute
        return
    program.sync()
    pending = PENDING[:]
    PENDING.clear()
    input_placement.settle(
        [storage.value for storage in pending if storage.value.array is not None]
    )
    metrics.count("syncs")
    if wait:
        jax.block_until_ready(jax.live_arrays())
        raise_failed()
    closures.run_step_closures()


PENDING: list[Storage] = []
"""Storages marked with a layout that no program has placed yet."""


@overload
def compile(step: Callable[..., Any], *, repeat: Repeat = None) -> CompiledStep: ...
@overload
def compile(*, repeat: Repeat) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile(step: Callable[..., Any] | None = None, *, repeat: Repeat = None) -> Any:
    """Capture a training step and replay it as one XLA program.

    The first call captures the step. From then on model code, autograd and optimizer are not run
    again: parameters, buffers and optimizer state are inputs and, donated, outputs of the program.
    Learning rates and step counts may change without recompilation. It also decorates methods.

    Gradients: a step that calls `zero_grad()` before `backward()` and updates the parameters keeps
    them inside the program; afterwards `parameter.grad` is None, and a `backward()` elsewhere that
    would have added to them raises, unless they were cleared. In every other step `.grad` is
    state like a parameter: read, added to and replaced as without `compile`. So gradients of
    several calls add up in one compiled step, and another one, or plain code, updates.

    Results that required a gradient still do, and raise `CaptureError` in a `backward()` outside.

    An optimizer that makes its state in the first call as zeros (Adam and most others) lets the
    step's Python code run twice in that call; one whose state starts otherwise (SGD with momentum)
    is captured in the second call.

    Args:
        step: a function (or method, or module) of tensors on the `jax` device and hashable values,
            nested in lists, dictionaries and whatever torch's pytrees know. Other shapes, dtypes,
            layouts and values are captured as further programs.
        repeat: "auto" compiles equal layers of an unmodified model once, as loops: forward,
            backward and optimizer. So compile time does not grow with depth. Parameters keep
            their names and are read and written as always; those of equal layers share one array
            between the calls, so reading one is a copy. Where that cannot be, or loops would copy
            so much that the step would be more than about 5 % slower (few rows, on a CPU), the step
            is compiled as it is; `iso.metrics.report()` says which, and why. "always" takes loops
            also where they are slower.

    Returns:
        A callable with the same arguments and results; without `step`, a decorator.

    Raises:
        ValueError: `repeat` is neither None, "auto" nor "always".
        TypeError: `step` cannot be called.
        CaptureError: when called, if `step` does something that a replay would not repeat. It names
            the line; parameters, gradients, optimizers and random state are then as before.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> model = torch.nn.Linear(3, 1).to("jax")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> @xs.compile
        ... def step(x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> x = torch.ones(4, 3, device="jax")
        >>> first, second = step(x).item(), step(x).item()
        >>> second < first
        True
    """
    if step is None:
        return functools.partial(CompiledStep, repeat=checked_repeat(repeat))
    if not callable(step):
        raise TypeError(
            f"xs.compile takes the step's function, not its result, and got a "
            f"{type(step).__name__}; write xs.compile(step), and call the result"
        )
    return CompiledStep(step, repeat)


def program_text(step: CompiledStep) -> str:
    """The optimised HLO of the program that a compiled step ran last.

    Args:
        step: made by `compile`.

    Returns:
        The text of one device's program.

    Raises:
        RuntimeError: the step was not captured yet.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> step = xs.compile(lambda x: x.sum())
        >>> _ = step(x)
        >>> "all-reduce(" in xs.program_text(step)
        True
    """
    return last_replay(step).program.text()


def memory_analysis(step: CompiledStep) -> Any:
    """XLA's account of the memory of the program that a compiled step ran last, per device.

    Args:
        step: made by `compile`.

    Returns:
        JAX's `CompiledMemoryStats`: bytes of arguments, results, temporaries and code.

    Raises:
        RuntimeError: the step was not captured yet.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> x = xs.mark_sharding(torch.ones(8, device="jax"), xs.get_1d_mesh("x"), ("x",))
        >>> step = xs.compile(lambda x: x.sum())
        >>> _ = step(x)
        >>> xs.memory_analysis(step).argument_size_in_bytes      # one of the eight float32
        4
    """
    return last_replay(step).program.compiled.memory_analysis()


def last_replay(step: CompiledStep) -> Any:
    """The replay that a compiled step ran last.

    Raises:
        RuntimeError: the step was not captured yet.
    """
    if step.last is None:
        raise RuntimeError("this step has not been captured yet: call it twice first")
    return step.last
