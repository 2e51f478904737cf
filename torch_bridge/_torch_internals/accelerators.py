"""Functions of C++ that `torch.accelerator` calls, and other readers of the accelerator.

>>> len(QUESTIONS), QUESTIONS["synchronizeDevice"].attribute
(15, '_accelerator_synchronizeDevice')
"""

from __future__ import annotations

from .declared import NAMES

_LATER = "2.13 to 2.15"

ACCELERATOR = NAMES.state(
    "torch._C._accelerator_getAccelerator",
    why="returns the accelerator of `torch.accelerator`",
    without="it is the `jax` device from the import on",
)

ACCELERATOR_OR_CPU = NAMES.state(
    "torch._C._get_accelerator",
    why="determines for which device process groups and `fully_shard` are made by default",
    without="they need it as an argument",
)

OUTSIDE_THE_TREE = NAMES.state(
    "torch._utils._is_privateuse1_backend_available",
    why="determines whether the device outside torch's tree is there, to torch's own test helpers",
    without="`torch.testing._internal.distributed` cannot be imported after isoshard's bridge",
    versions=_LATER,
)

REPLICATED_OVER = NAMES.state(
    "torch.nn.parallel.data_parallel._get_available_device_type",
    why="determines over which devices `DataParallel` copies a module",
    without="`DataParallel` raises",
)

PROFILED = NAMES.state(
    "torch.autograd._supported_activities",
    why="lists what `torch.profiler.profile()` records by default",
    without="tables of programs on the CPU have empty columns of the `jax` device",
)

EMPTY_HOST_CACHE = NAMES.bind(
    "torch._C._host_emptyCache",
    why="gives back page-locked memory of CUDA",
    without="`torch.accelerator.empty_host_cache` raises where the accelerator is not `jax`",
)

QUESTIONS = {
    path.rpartition("_")[2]: NAMES.state(
        path,
        why="is called by a function of `torch.accelerator`",
        without="that function raises",
        versions=_LATER if path.endswith("emptyHostCache") else None,
    )
    for path in (
        "torch._C._accelerator_emptyCache",
        "torch._C._accelerator_emptyHostCache",
        "torch._C._accelerator_exchangeDevice",
        "torch._C._accelerator_getDeviceCapability",
        "torch._C._accelerator_getDeviceIndex",
        "torch._C._accelerator_getDeviceStats",
        "torch._C._accelerator_getMemoryInfo",
        "torch._C._accelerator_getStream",
        "torch._C._accelerator_isAllocatorInitialized",
        "torch._C._accelerator_maybeExchangeDevice",
        "torch._C._accelerator_resetAccumulatedStats",
        "torch._C._accelerator_resetPeakStats",
        "torch._C._accelerator_setDeviceIndex",
        "torch._C._accelerator_setStream",
        "torch._C._accelerator_synchronizeDevice",
    )
}
