"""What this host's cores do, measured once in a process: the chip of virtual CPU devices.

Virtual devices share the host's cores: each has its part of what all do together. A collective
between them is copies in memory. Measured are a matrix product and a copy, as XLA runs them, and
sums over some devices, of one number (how long they take to meet) and of many: together about a
second.
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

_SIDE = 512
_COPIED = 32 * 2**20
_MEETING = 8


@dataclasses.dataclass(frozen=True)
class HostRates:
    """What all cores of this host do together.

    Attributes:
        flops: float32 operations a second in a matrix product.
        bandwidth: bytes a second, read or written, in a large copy.
        copied: bytes a second that collectives give all devices together.
        meeting: seconds in which the devices of the process meet once.
        memory: bytes of the host.
        cores: how many there are.
    """

    flops: float
    bandwidth: float
    copied: float
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
    bandwidth, copied = host.bandwidth / devices, host.copied / devices
    return Chip(
        "cpu", "cpu", "cpu", {"float32": rate, "bfloat16": rate, "float64": rate / 2},
        host.memory // devices, bandwidth, copied, 0, devices, copied, host.meeting,
        f"measured: {host.cores} cores shared by {devices} devices",
    )  # fmt: skip


@functools.cache
def host_rates() -> HostRates:
    """Measure this host, once in a process.

    Example:
        >>> host_rates().flops > 1e8 and host_rates() is host_rates()
        True
    """
    # The caller may be being traced: nothing of this is to become part of its program.
    with jax.ensure_compile_time_eval():
        return _measured(jax.local_devices(backend="cpu"))


def _measured(here: list[Any]) -> HostRates:
    one = jax.sharding.SingleDeviceSharding(here[0])
    square = jax.device_put(np.ones((_SIDE, _SIDE), np.float32), one)
    long = jax.device_put(np.ones(_COPIED // 4, np.float32), one)
    product = _best(_compiled(lambda a: a @ a, square), square)
    copy = _best_in_place(_compiled(jnp.negative, long, donate_argnums=0), long)
    some = here[:_MEETING]
    meeting, copied = 0.0, _COPIED / copy
    if len(some) > 1:
        meeting = _summed(some, 1)
        each = _COPIED // len(some)
        copied = _COPIED / max(_summed(some, each // 4) - meeting, 1e-6)
    return HostRates(
        2 * _SIDE**3 / product,
        2 * _COPIED / copy,
        copied,
        meeting,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os.cpu_count() or 1,
    )


def _summed(devices: list[Any], numbers: int) -> float:
    """Seconds in which devices add up as many numbers each."""
    mesh = Mesh(np.array(devices, object), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    given = jax.device_put(np.ones((len(devices), numbers), np.float32), rows)
    added = _compiled(
        lambda rows: rows.sum(0), given, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    return _best(added, given)


def _compiled(function: Callable[[Any], Any], argument: Any, **options: Any) -> Any:
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
    fastest, end = float("inf"), time.perf_counter() + 0.08
    for count in range(100):
        start = time.perf_counter()
        if count >= 3 and start > end:
            break
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
