"""`torch.accelerator`: the `jax` device, from its first tensor on.

torch takes the one device that lives outside its tree for the machine's accelerator as soon as it
is registered. Then programs that never use it change: `DataLoader` pins memory, process groups and
`DataParallel` look for backends. So until there is a tensor on the device, or `xs.xla_device()` was
called, torch finds what it would find without isoshard.

>>> x = torch.ones(2, device="jax")
>>> torch.accelerator.current_accelerator(), torch.accelerator.device_count()
(device(type='jax'), 1)
>>> torch.accelerator.synchronize()
>>> sorted(torch.accelerator.memory_stats())[:2]
['allocated_bytes.all.current', 'allocated_bytes.all.peak']
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .._torch_internals import accelerators
from .._torch_internals.undocumented import XPU
from ..common.dtypes import supported
from ..engine.recording import lazy_tensor
from ..execution.runtime import sync
from .memory import get_memory_info

_OTHERS: dict[str, Callable[[], bool]] = {
    "cuda": torch.backends.cuda.is_built,
    "xpu": lambda: XPU.resolve(None) is not None,
    "mps": torch.backends.mps.is_built,
}
"""The accelerators in torch's tree, and whether this torch was built for them."""

_PROCESS_GROUPS = ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh")

NONE = "Cannot access accelerator device when none is available."  # torch's words


def register(module: Any) -> None:
    """Answer for the device where it is the accelerator.

    Args:
        module: `torch.jax`.
    """
    instead: list[tuple[Any, Callable[[Any], Any]]] = [
        (accelerators.ACCELERATOR, lambda _: _accelerator_of_caller),
        (accelerators.ACCELERATOR_OR_CPU, lambda _: _of_process_groups),
        (accelerators.OUTSIDE_THE_TREE, lambda _: lazy_tensor.used),
        (accelerators.REPLICATED_OVER, _without_copies),
        (accelerators.PROFILED, _but_ours),
    ]
    for name, question in accelerators.QUESTIONS.items():
        instead.append(
            (question, functools.partial(_answering, _ANSWERS[name], _OTHER_ANSWERS.get(name)))
        )
    for question, make in instead:
        if question.resolve(None) is not None:
            question.wrap(make)
    torch.get_device_module = _with_ours(torch.get_device_module, module)
    if torch.distributed.is_available():
        backend = torch.distributed.Backend
        backend.default_device_backend_map["jax"] = backend.GLOO  # of what ranks have on the CPU


def without_ours() -> torch.device | None:
    """The accelerator that torch is built for, without an index; None for none."""
    return next((torch.device(kind) for kind, built in _OTHERS.items() if built()), None)


def _accelerator_of_caller(*_: Any) -> torch.device | None:
    """The accelerator; none for process groups, none of whose backends supports `jax`.

    The ranks of the device meet in JAX.
    """
    if not lazy_tensor.used():
        return without_ours()
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_globals.get("__name__") == "torch.accelerator":
        caller = caller.f_back
    return None if caller.f_globals.get("__name__") in _PROCESS_GROUPS else torch.device("jax")


def _of_process_groups(*_: Any) -> torch.device:
    """The device of process groups by default."""
    device = None if lazy_tensor.used() else without_ours()
    if device is None or not torch.get_device_module(device).is_available():
        return torch.device("cpu")
    return device


def _without_copies(torchs: Callable[[], str | None]) -> Callable[[], str | None]:
    """The device type over which `DataParallel` copies: a mesh is one device, and has no copies."""

    def device_type() -> str | None:
        kind = torchs()
        return None if kind == "jax" else kind

    return device_type


def _but_ours(activities: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    """What torch's profiler records: nothing of JAX's, which has a profiler of its own."""
    return lambda: activities() - {torch.profiler.ProfilerActivity.PrivateUse1}


def _answering(
    answer: Callable[..., Any] | None,
    ask_other: Callable[..., Any] | None,
    torchs: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap a function of C++, which returns the `jax` device's value as soon as that is registered.

    Args:
        answer: for the `jax` device; None where torch's own answer is right.
        ask_other: calls the module of another accelerator, such as `torch.cuda`; None where no such
            module has an answer.
        torchs: the function.
    """

    def call(*args: Any) -> Any:
        if lazy_tensor.used():
            return torchs(*args) if answer is None else answer(*args)
        other = without_ours()
        if other is None:
            raise RuntimeError(NONE)
        return (
            torchs(*args) if ask_other is None else ask_other(torch.get_device_module(other), *args)
        )

    return call


def _with_ours(torchs: Any, module: Any) -> Any:
    """`torch.get_device_module`, which caches its first result."""

    @functools.wraps(torchs)
    def get_device_module(device: torch.device | str | None = None) -> Any:
        return module if device is None and lazy_tensor.used() else torchs(device)

    return get_device_module


def stats() -> dict[str, Any]:
    """Memory of the process's devices as torch's allocators nest it, in bytes.

    As far as JAX reports it: see `torch_xla.core.xla_model.get_memory_info`.
    """
    info = get_memory_info()
    used = {"all": {"current": info["bytes_used"], "peak": info["peak_bytes_used"]}}
    return {"allocated_bytes": used, "reserved_bytes": used}


def free_and_total() -> tuple[int, int]:
    """Free and total bytes of memory."""
    info = get_memory_info()
    return info["bytes_limit"] - info["bytes_used"], info["bytes_limit"]


def keep_peaks(*_: Any) -> None:
    """Warn that peaks cannot be reset: JAX keeps them for the life of a process."""
    warnings.warn(
        "JAX keeps the peak of memory for the life of the process: it is not reset", stacklevel=3
    )


def _capability(_: int) -> dict[str, Any]:
    return {"supported_dtypes": supported()}


def _check_index(index: int) -> None:
    if index not in (0, -1):
        raise RuntimeError(f"there is one logical device, jax:0, and index {index} was requested")


def _exchanged(index: int) -> int:
    _check_index(index)
    return 0


def _exchange(module: Any, index: int) -> int:
    before = module.current_device()
    if index >= 0:
        module.set_device(index)
    return before


_ANSWERS: dict[str, Callable[..., Any] | None] = {
    "emptyCache": lambda: None,  # JAX frees arrays without references
    "emptyHostCache": lambda: None,
    "exchangeDevice": _exchanged,
    "getDeviceCapability": _capability,
    "getDeviceIndex": lambda: 0,
    "getDeviceStats": lambda _: stats(),
    "getMemoryInfo": lambda _: free_and_total(),
    "getStream": None,
    "isAllocatorInitialized": lambda: True,
    "maybeExchangeDevice": _exchanged,
    "resetAccumulatedStats": keep_peaks,
    "resetPeakStats": keep_peaks,
    "setDeviceIndex": _check_index,
    "setStream": lambda _: None,
    "synchronizeDevice": lambda _: sync(wait=True),
}

_OTHER_ANSWERS: dict[str, Callable[..., Any]] = {
    "emptyCache": lambda module: module.empty_cache(),
    "emptyHostCache": lambda _: accelerators.EMPTY_HOST_CACHE(),
    "exchangeDevice": _exchange,
    "getDeviceIndex": lambda module: module.current_device(),
    "getDeviceStats": lambda module, index: module.memory_stats_as_nested_dict(index),
    "getMemoryInfo": lambda module, index: module.mem_get_info(index),
    "getStream": lambda module, index: module.current_stream(index),
    "isAllocatorInitialized": lambda module: module.is_initialized(),
    "maybeExchangeDevice": _exchange,
    "resetAccumulatedStats": lambda module, i: module.reset_accumulated_memory_stats(i),
    "resetPeakStats": lambda module, index: module.reset_peak_memory_stats(index),
    "setDeviceIndex": lambda module, index: module.set_device(index),
    "setStream": lambda module, stream: module.set_stream(stream),
    "synchronizeDevice": lambda module, index: module.synchronize(index),
}
"""Calls of another accelerator's module while no tensor is on the `jax` device."""
