"""What this host's cores do, measured once in a process: the chip of virtual CPU devices.

Virtual devices share the host's cores: each has its part of what all do together. A collective
between them is copies in memory. Measured are a matrix product and a copy, as XLA runs them, and
how long the devices take to meet in an all-reduce of one number: together about half a second.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .chips import Chip

_SIDE = 768
_COPIED = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class HostRates:
    """What all cores of this host do together.

    Attributes:
        flops: float32 operations a second in a matrix product.
        bandwidth: bytes a second, read or written, in a large copy.
        meeting: seconds in which all devices of the process meet once.
        memory: bytes of the host.
        cores: how many there are.
    """

    flops: float
    bandwidth: float
    meeting: float
    memory: int
    cores: int


def cpu_chip(devices: int) -> Chip:
    """The chip of one of several virtual devices of this host.

    Args:
        devices: how many share the host.

    Returns:
        A chip whose rates are the host's over the number of devices.
    """
    host = host_rates()
    rate = host.flops / devices
    bandwidth = host.bandwidth / devices
    return Chip(
        "cpu", "cpu", "cpu", {"float32": rate, "bfloat16": rate, "float64": rate / 2},
        host.memory // devices, bandwidth, bandwidth / 2, 0, devices, bandwidth / 2, host.meeting,
        f"measured: {host.cores} cores shared by {devices} devices",
    )  # fmt: skip


@functools.cache
def host_rates() -> HostRates:
    """Measure this host, once in a process.

    Example:
        >>> host_rates().flops > 1e8 and host_rates() is host_rates()
        True
    """
    here = jax.local_devices(backend="cpu")
    one = jax.sharding.SingleDeviceSharding(here[0])
    square = jax.device_put(np.ones((_SIDE, _SIDE), np.float32), one)
    long = jax.device_put(np.ones(_COPIED // 4, np.float32), one)
    product = _compiled(lambda a: a @ a, square)
    copy = _compiled(jnp.negative, long, donate_argnums=0)
    return HostRates(
        2 * _SIDE**3 / _best(product, square),
        2 * _COPIED / _best_in_place(copy, long),
        _meeting(here),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os.cpu_count() or 1,
    )


def _meeting(devices: list[Any]) -> float:
    if len(devices) == 1:
        return 0.0
    mesh = Mesh(np.array(devices, object), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    numbers = jax.device_put(
        np.ones(len(devices), np.float32), NamedSharding(mesh, PartitionSpec("all"))
    )
    summed = _compiled(jnp.sum, numbers, out_shardings=whole)
    still = _compiled(jnp.negative, numbers)
    return max(1e-6, _best(summed, numbers) - _best(still, numbers))


def _compiled(function: Callable[[Any], Any], argument: Any, **options: Any) -> Any:
    # Compiled ahead of the call, so that a caller that is being traced traces nothing of this.
    return jax.jit(function, **options).lower(argument).compile()


def _best(function: Callable[[Any], Any], argument: Any) -> float:
    """Seconds of the fastest of several runs: others share the cores."""
    return _fastest(lambda: jax.block_until_ready(function(argument)))


def _best_in_place(function: Callable[[Any], Any], argument: Any) -> float:
    """The same for a function that is given its argument's memory for its result."""
    kept = [argument]

    def run() -> None:
        kept[0] = jax.block_until_ready(function(kept[0]))

    return _fastest(run)


def _fastest(run: Callable[[], Any]) -> float:
    run()
    fastest, end = float("inf"), time.perf_counter() + 0.1
    for count in range(50):
        start = time.perf_counter()
        if count >= 3 and start > end:
            break
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
