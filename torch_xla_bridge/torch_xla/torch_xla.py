"""The top-level functions of torch_xla.

>>> import torch
>>> device(), devices(), device_count()
(device(type='jax', index=0), [device(type='jax', index=0)], 8)
>>> with step():
...     x = torch.ones(2, device=device()) + 1
>>> x
tensor([2., 2.], device='jax:0')
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import torch

from isoshard.torch_bridge.kit import hardware, is_spmd, naming, on_request, regions, runtime

from .core import xla_model as _xla_model


def device(index: int | None = None) -> torch.device:
    """The logical device.

    Args:
        index: 0 or None; after `runtime.use_spmd()` any number.

    Raises:
        IndexError: another number was asked for, and SPMD mode was not.
    """
    return hardware.xla_device(index)


def devices() -> list[torch.device]:
    """The logical devices: a list of one."""
    return [naming.current()]


def real_devices() -> list[str]:
    """The chips of this process, such as `["CPU:0", "CPU:1"]`."""
    return hardware.chip_names(jax.local_devices())


def device_count() -> int:
    """How many chips this process has."""
    return len(jax.local_devices())


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Execute every operation recorded so far as one XLA program, and then the step closures.

    Args:
        wait: also wait until the devices have finished. `XLA_SYNC_WAIT=1` makes it always so.
        reset_scope: not used.
    """
    forced = os.environ.get("XLA_SYNC_WAIT")
    runtime.sync(wait=wait if forced is None else bool(int(forced)))


def step() -> contextlib.AbstractContextManager[None]:
    """Context of one training step: executes what is recorded before it, and at its end."""
    return compile()


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """Execute what a function records as one program, apart from what comes before and after.

    It is called as `compile(f)`, as a decorator (`@compile` or `@compile(full_graph=True)`), or as
    a context manager. The Python code runs in every call, as in torch_xla, so nothing is refused;
    `isoshard.torch_bridge.compile` captures a whole training step instead, which is faster.

    Args:
        f: a function or module.
        full_graph: raise if a value is needed before the end, which would make several programs.
        name: appears in error messages and in `isoshard.metrics.report()`.
        max_different_graphs: raise if more different programs are recorded, over all calls.

    Returns:
        The function that does so; without `f` a context manager and decorator.

    Raises:
        RuntimeError: when called, if `full_graph` or `max_different_graphs` does not hold.

    >>> @compile(full_graph=True)
    ... def double(x):
    ...     return x * 2
    >>> double(torch.ones(1, device=device()))
    tensor([2.], device='jax:0')
    """
    if max_different_graphs is not None and max_different_graphs < 1:
        raise ValueError(f"max_different_graphs is 1 or more, and it is {max_different_graphs}")
    wrapped = _Compiled(name, bool(full_graph), max_different_graphs)
    return wrapped if f is None else wrapped(f)


class _Compiled:
    """A region that begins and ends with `sync`."""

    def __init__(self, name: str | None, one_program: bool, most: int | None):
        self._named = name
        self._region = regions.Region(name or "the block", one_program, most)
        self._open: list[regions.inside] = []

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._named is None:
            self._region.name = getattr(function, "__name__", type(function).__name__)

        placing = None

        @functools.wraps(function)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            nonlocal placing
            if placing is None:
                placing = on_request.argument_sharder(function, args, kwargs)
            if placing is not None:
                placing(args, kwargs)
            with self:
                return function(*args, **kwargs)

        return compiled

    def __enter__(self) -> None:
        runtime.sync()
        self._open.append(regions.inside(self._region))
        self._open[-1].__enter__()

    def __exit__(self, *exc: object) -> None:
        self._open.pop().__exit__(*exc)
        with regions.inside(self._region, ended=True):
            runtime.sync()


def manual_seed(seed: int, device: str | torch.device | None = None) -> None:
    """Seed the random numbers of the device.

    Args:
        seed: an integer.
        device: the logical device; None means it too.
    """
    _xla_model.set_rng_state(seed, device)


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Run a function as one replica; several raise.

    Args:
        fn: called with the number of the replica, 0, and then `args`.
        args: its arguments.
        start_method: not used; the function runs in this process.
        debug_single_process: ask for one replica.

    Raises:
        NotImplementedError: in SPMD mode, as in torch_xla, or if there are several chips and so
            several replicas would run.
    """
    if is_spmd():
        raise NotImplementedError(
            "torch_xla.launch starts replicas, and an SPMD script is one: call "
            f"{getattr(fn, '__name__', 'the function')}(0, *args) yourself"
        )
    from .distributed import xla_multiprocessing

    xla_multiprocessing.spawn(fn, args, nprocs=1 if debug_single_process else None)
