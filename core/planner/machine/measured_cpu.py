"""What this host's cores do, measured once in a process: the chip of virtual CPU devices.

Virtual devices share the host's cores and memory: each has its part of what all do together. So it
is measured with some devices at work at once, as XLA runs them:

- a matrix product and both of its gradients, which read their operands in other orders;
- an update of arrays that are larger than caches, as an optimizer makes it;
- each kind of collective, which is copies in memory: of many numbers, and one after the other of
  few, which is how long devices take to meet;
- temporaries in a block that is too large for the C library to keep: then the kernel maps it anew
  in each step, and clears it page by page.

Together that takes about two seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .chips import Chip

_SIDE = 512
_CHANGED = 64 * 2**20
"""Bytes of one array on all devices: more than caches hold."""
_SENT = 4 * 2**20
"""Bytes of one device's result in a collective."""
_AT_WORK = 8
_MEETINGS = 9

KEPT = 32 * 2**20
"""Bytes of a block that the C library keeps when it is freed. Larger ones it gives back: glibc's
`DEFAULT_MMAP_THRESHOLD_MAX` of 64-bit machines (https://man7.org/linux/man-pages/man3/mallopt.3.html,
`M_MMAP_THRESHOLD`). XLA makes one block of all temporaries of a program."""


@dataclasses.dataclass(frozen=True)
class HostRates:
    """What all cores of this host do together.

    Attributes:
        flops: float32 operations a second in matrix products.
        bandwidth: bytes a second, read or written, in large arrays.
        copied: bytes a second that collectives give all devices together, by HLO's name of the
            kind; of a reduce-scatter those of the operands. Empty if there is one device.
        meeting: seconds in which the devices of the process meet once.
        fresh: bytes a second of memory that is new to the process; 0 if it takes no time.
        memory: bytes of the host.
        cores: how many there are.
    """

    flops: float
    bandwidth: float
    copied: Mapping[str, float]
    meeting: float
    fresh: float
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
    rate, bandwidth = host.flops / devices, host.bandwidth / devices
    copied = {kind: rate / devices for kind, rate in host.copied.items()}
    link = min(copied.values(), default=bandwidth)
    return Chip(
        "cpu", "cpu", "cpu", {"float32": rate, "bfloat16": rate, "float64": rate / 2},
        host.memory // devices, bandwidth, link, 0, devices, link, host.meeting,
        f"measured: {host.cores} cores shared by {devices} devices", copied=copied,
        fresh=host.fresh / devices, kept=KEPT,
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
        return _measured(jax.local_devices(backend="cpu")[:_AT_WORK])


def _measured(devices: list[Any]) -> HostRates:
    count = len(devices)
    bench = _Bench(devices)
    changed = bench.seconds(_updated, (_CHANGED // 4 // count,), arrays=3)
    meeting, copied = 0.0, dict[str, float]()
    if count > 1:
        once, often = (bench.seconds(_meeting(times), (count,)) for times in (1, _MEETINGS))
        meeting = max(0.0, often - once) / (_MEETINGS - 1)
        for kind in _COLLECTIVES:
            taken = bench.seconds(_once(kind, count), (_SENT // 4,))
            copied[kind] = count * _SENT / max(taken - once, 1e-6)
    small, large = (bench.seconds(_held(bytes_), (count,)) for bytes_ in (KEPT // 2, 2 * KEPT))
    new = large - 4 * small
    products = bench.seconds(_products, (_SIDE, _SIDE))
    return HostRates(
        3 * count * 2 * _SIDE**3 / products,
        5 * _CHANGED / changed,
        MappingProxyType(copied),
        meeting,
        count * 2 * KEPT / new if new > 0 else 0.0,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os.cpu_count() or 1,
    )


def _products(x: jax.Array) -> tuple[jax.Array, ...]:
    return x @ x, x @ x.T, x.T @ x


def _meeting(times: int) -> Callable[[jax.Array], jax.Array]:
    """All-reduces of few numbers, each waiting for the one before."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = 0.5 * jax.lax.psum(x, _Bench.axis)
        return x

    return run


def _held(bytes_: int) -> Callable[[jax.Array], jax.Array]:
    """A temporary of so many bytes, written once: what a loop changes has memory of its own."""

    def run(x: jax.Array) -> jax.Array:
        held = jnp.broadcast_to(x[:1], (bytes_ // 4,))
        held = jax.lax.fori_loop(0, 2, lambda at, y: y.at[at].set(y[at + 1] + 1), held)
        return _one_of(held, x)

    return run


def _gathered(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.all_gather(x[: x.size // count], _Bench.axis, tiled=True)


def _scattered(x: jax.Array, count: int) -> jax.Array:
    part = jax.lax.psum_scatter(x, _Bench.axis, tiled=True)
    return jnp.pad(part, (0, x.size - part.size))


def _summed(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.psum(x, _Bench.axis)


def _exchanged(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.all_to_all(x, _Bench.axis, 0, 0, tiled=True)


def _shifted(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.ppermute(x, _Bench.axis, [(n, (n + 1) % count) for n in range(count)])


_COLLECTIVES: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "all-gather": _gathered,
    "reduce-scatter": _scattered,
    "all-reduce": _summed,
    "all-to-all": _exchanged,
    "collective-permute": _shifted,
}


def _updated(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """What an optimizer with momentum does: three arrays are read, two written."""
    weight, momentum, gradient = arrays
    momentum = 0.9 * momentum + 0.1 * gradient
    return weight - 1e-3 * momentum, momentum, gradient


def _once(kind: str, count: int) -> Callable[[jax.Array], jax.Array]:
    """One collective: of several in a row XLA would compute some by itself."""
    return lambda x: _one_of(_COLLECTIVES[kind](x, count), x)


def _one_of(held: jax.Array, x: jax.Array) -> jax.Array:
    """An element whose place nobody knows before: all of them are computed, as a temporary."""
    return jax.lax.dynamic_slice(held, (x[0].astype(int),), (1,))


class _Bench:
    """Runs a function on all of some devices at once."""

    axis = "all"

    def __init__(self, devices: list[Any]) -> None:
        self.mesh = Mesh(np.array(devices, object), (self.axis,))

    def seconds(
        self, function: Callable[[Any], Any], shape: tuple[int, ...], *, arrays: int = 0
    ) -> float:
        """Of the fastest of several runs: others share the cores.

        Args:
            function: of one device's array; or of several, which it gives back changed in place.
            shape: of each on one device.
            arrays: how many; 0 is one that stays.
        """
        spec = PartitionSpec(self.axis)
        first, *rest = shape
        whole = np.ones((first * self.mesh.size, *rest), np.float32)
        layout = NamedSharding(self.mesh, spec)
        given = jax.device_put(whole, layout)
        if arrays:
            given = tuple(jax.device_put(whole, layout) for _ in range(arrays))
        on_each = jax.shard_map(
            function, mesh=self.mesh, in_specs=(spec,), out_specs=spec, check_vma=False
        )
        donated = 0 if arrays else ()
        compiled = jax.jit(on_each, donate_argnums=donated).lower(given).compile()

        def run() -> None:
            nonlocal given
            result = jax.block_until_ready(compiled(given))
            given = result if arrays else given

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
