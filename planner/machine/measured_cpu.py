"""Rates of this host's cores, measured once in a process: the chip of virtual CPU devices.

Virtual devices share the host's cores and memory: each has its share of the total. So the rates
are measured with several devices at once, as XLA runs them:

- a matrix product and both of its gradients, which read their operands in other orders;
- an update of arrays that are larger than caches, as an optimizer's;
- each kind of collective, which is copies in memory, by the size of a group: of eight devices each
  shard of a gathered array is read by all, so caches serve it; in pairs each half is read by two;
- a copy to another layout, as of an array that was gathered along an inner axis;
- collectives of few elements, by the size of a group: one after the other, and between layers of
  small operations, which devices finish at different times, so that cores idle until the last
  one arrives;
- temporaries in a block that is too large for the C library to keep: then the kernel maps it again
  in each step, and clears it page by page.

Together that takes about six seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
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
"""Bytes of one array on all devices: more than the caches."""
_SENT = 4 * 2**20
"""Bytes of one device's result in a collective."""
_AT_WORK = 8
_MEETINGS, _TURNS = 24, 12
_WIDTH, _NARROW = 256, 64
"""Of the layer between collectives: small operations, in which cores switch between devices."""

KEPT = 32 * 2**20
"""Bytes of a block that the C library keeps when it is freed. Larger ones it unmaps: glibc's
`DEFAULT_MMAP_THRESHOLD_MAX` of 64-bit machines (https://man7.org/linux/man-pages/man3/mallopt.3.html,
`M_MMAP_THRESHOLD`). XLA allocates all temporaries of a program as one block."""


@dataclasses.dataclass(frozen=True)
class HostRates:
    """Rates of all cores of this host together.

    Attributes:
        flops: float32 operations a second in matrix products.
        bandwidth: bytes a second, read or written, in large arrays.
        copied: bytes a second that collectives copy to all devices together, by HLO's name of the
            kind and the size of a group; of a reduce-scatter those of the operands. Empty with one
            device.
        reordered: bytes a second, read or written, of copies to another layout.
        meetings: seconds of a collective of idle devices, by the size of a group.
        waits: seconds that they wait for each other besides, after `between` of work, by size.
        between: seconds of that work.
        fresh: bytes a second of newly allocated memory; 0 if it takes no time.
        memory: bytes of the host.
        cores: how many there are.
    """

    flops: float
    bandwidth: float
    copied: Mapping[str, Mapping[int, float]]
    reordered: float
    meetings: Mapping[int, float]
    waits: Mapping[int, float]
    between: float
    fresh: float
    memory: int
    cores: int


def cpu_chip(devices: int) -> Chip:
    """The chip of one of several virtual devices of this host."""
    host = host_rates()
    rate, bandwidth = host.flops / devices, host.bandwidth / devices
    copied = {
        kind: {size: of_size(rates, size, grows=False) / devices for size in _sizes(devices)}
        for kind, rates in host.copied.items()
    }
    link = min((rates[devices] for rates in copied.values() if rates), default=bandwidth)
    meetings, waits = (
        {size: of_size(measured, size) for size in _sizes(devices)}
        for measured in (host.meetings, host.waits)
    )
    return Chip(
        "cpu", "cpu", "cpu", {"float32": rate, "bfloat16": rate, "float64": rate / 2},
        host.memory // devices, bandwidth, link, 0, devices, link, meetings.get(devices, 0.0),
        f"measured: {host.cores} cores shared by {devices} devices", copied=copied,
        reordered=host.reordered / devices,
        meetings=meetings, waits=waits, between=host.between, fresh=host.fresh / devices, kept=KEPT,
    )  # fmt: skip


def of_size(measured: Mapping[int, float], size: int, *, grows: bool = True) -> float:
    """The measurement for groups of a size, or for the next larger size.

    Example:
        >>> of_size({2: 1.0, 4: 3.0}, 3), of_size({2: 1.0, 4: 3.0}, 8), of_size({}, 8)
        (3.0, 6.0, 0.0)
    """
    if not measured:
        return 0.0
    largest = max(measured)
    next_size = min((n for n in measured if n >= size), default=largest)
    return measured[next_size] * (max(1, size / largest) if grows else 1)


@functools.cache
def host_rates() -> HostRates:
    """Measure this host, once in a process.

    Example:
        >>> host_rates().flops > 1e8 and host_rates() is host_rates()
        True
    """
    # The caller may be traced: nothing of this may become part of its program.
    with jax.ensure_compile_time_eval():
        return _measured(jax.local_devices(backend="cpu")[:_AT_WORK])


def _measured(devices: list[Any]) -> HostRates:
    count = len(devices)
    bench = _Bench(devices)
    changed = bench.seconds(_updated, (_CHANGED // 4 // count,), arrays=3)
    copied: dict[str, dict[int, float]] = {kind: {} for kind in _COLLECTIVES if count > 1}
    meetings, waits, between = _meetings(devices)
    for size in _sizes(count):
        group = _Bench(devices, size)
        sum_seconds = group.seconds(_single_sum, (count,))
        for kind, rates in copied.items():
            taken = group.seconds(_single_collective(kind, size), (_SENT // 4,))
            rates[size] = count * _SENT / max(taken - sum_seconds, 1e-6)
    small, large = (bench.seconds(_temporary(bytes_), (count,)) for bytes_ in (KEPT // 2, 2 * KEPT))
    new = large - 4 * small
    products = bench.seconds(_products, (_SIDE, _SIDE))
    return HostRates(
        3 * count * 2 * _SIDE**3 / products,
        5 * _CHANGED / changed,
        MappingProxyType(copied),
        2 * count * _SENT / bench.seconds(_turned, (_SENT // 4,)),
        MappingProxyType(meetings),
        MappingProxyType(waits),
        between,
        count * 2 * KEPT / new if new > 0 else 0.0,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os.cpu_count() or 1,
    )


def _products(x: jax.Array) -> tuple[jax.Array, ...]:
    return x @ x, x @ x.T, x.T @ x


def _sizes(count: int) -> list[int]:
    """Of groups of equal size."""
    return [size for size in range(2, count + 1) if count % size == 0]


def _meetings(devices: list[Any]) -> tuple[dict[int, float], dict[int, float], float]:
    """Seconds of collectives of idle devices, the additional ones after a layer, and the layer's.

    Runs with many collectives are compared with runs of two, by turns. How long devices wait for
    each other differs from run to run: the lower quartile counts. Of the work it is the fastest
    run, as in all rates, in which no core idles.
    """
    sizes, result, meetings = _sizes(len(devices)), list[dict[int, float]](), 0.0
    for layer in (_nothing, _layer):
        few, *many = (
            _Bench(devices, size).prepared(_layers(layer, every), (_WIDTH, _WIDTH))
            for size, every in ((0, _MEETINGS - 1), *((size, 1) for size in sizes))
        )
        taken = [[_timed(run) for run in (few, *many)] for _ in range(_TURNS)]
        alone, *more = zip(*taken, strict=True)
        meetings = min(alone)
        extra = (max(0.0, statistics.quantiles(times)[0] - meetings) for times in more)
        each = (seconds / (_MEETINGS - 2) for seconds in extra)
        result.append(dict(zip(sizes, each, strict=True)))
    idle, busy = result
    return idle, {size: max(0.0, busy[size] - idle[size]) for size in sizes}, meetings / _MEETINGS


def _layers(
    layer: Callable[[jax.Array, jax.Array], jax.Array], every: int
) -> Callable[[jax.Array], jax.Array]:
    """Layers with an all-reduce of a few elements after the first, and then after every n-th."""

    def run(x: jax.Array) -> jax.Array:
        y = x
        for index in range(_MEETINGS):
            y = layer(y, x)
            few = y[:4]
            few = few + 1 if index % every else jax.lax.psum(few, _Bench.axis)
            y = jax.lax.dynamic_update_slice(y, jnp.tanh(few), (0, 0))
        return y

    return run


def _nothing(y: jax.Array, x: jax.Array) -> jax.Array:
    return y


def _layer(y: jax.Array, x: jax.Array) -> jax.Array:
    weight = x[:, :_NARROW] / _WIDTH
    inner = y @ weight
    inner = inner / (1 + jnp.abs(inner).mean(-1, keepdims=True))
    y = y + jnp.tanh(inner @ weight.T)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1)


def _single_sum(x: jax.Array) -> jax.Array:
    return 0.5 * jax.lax.psum(x, _Bench.axis)


def _turned(x: jax.Array) -> jax.Array:
    """The copy after a gather of eight shards along an inner axis, with rows of 64 elements."""
    return x.reshape(8, -1, 64).swapaxes(0, 1).reshape(-1)


def _temporary(bytes_: int) -> Callable[[jax.Array], jax.Array]:
    """A temporary of a size, written once: the carry of a loop has memory of its own."""

    def run(x: jax.Array) -> jax.Array:
        temporary = jnp.broadcast_to(x[:1], (bytes_ // 4,))
        temporary = jax.lax.fori_loop(0, 2, lambda at, y: y.at[at].set(y[at + 1] + 1), temporary)
        return _any_element(temporary, x)

    return run


def _gathered(x: jax.Array, count: int) -> jax.Array:
    return jax.lax.all_gather(x[: x.size // count], _Bench.axis, tiled=True)


def _scattered(x: jax.Array, count: int) -> jax.Array:
    scattered = jax.lax.psum_scatter(x, _Bench.axis, tiled=True)
    return jnp.pad(scattered, (0, x.size - scattered.size))


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
    """The update of an optimizer with momentum: three arrays are read, two written."""
    weight, momentum, gradient = arrays
    momentum = 0.9 * momentum + 0.1 * gradient
    return weight - 1e-3 * momentum, momentum, gradient


def _single_collective(kind: str, count: int) -> Callable[[jax.Array], jax.Array]:
    """One collective: of several in a row XLA would compute some by itself."""
    return lambda x: _any_element(_COLLECTIVES[kind](x, count), x)


def _any_element(array: jax.Array, x: jax.Array) -> jax.Array:
    """An element whose index is not static: XLA computes all of them, as a temporary."""
    return jax.lax.dynamic_slice(array, (x[0].astype(int),), (1,))


class _Bench:
    """Runs a function on several devices at once.

    Args:
        devices: the devices.
        size: of the groups of collectives; 0 is all of them.
    """

    axis = "all"

    def __init__(self, devices: list[Any], size: int = 0) -> None:
        groups = np.array(devices, object).reshape(-1, size or len(devices))
        self.mesh = Mesh(groups, ("groups", self.axis))

    def prepared(
        self, function: Callable[[Any], Any], shape: tuple[int, ...], *, arrays: int = 0
    ) -> Callable[[], None]:
        """A compiled function and its arrays: each call is a run.

        Args:
            function: of one device's array; or of several, which are donated and returned.
            shape: of each on one device.
            arrays: how many; 0 is one that is not donated.
        """
        spec = PartitionSpec(self.mesh.axis_names)
        first, *rest = shape
        full = np.ones((first * self.mesh.size, *rest), np.float32)
        layout = NamedSharding(self.mesh, spec)
        operands = jax.device_put(full, layout)
        if arrays:
            operands = tuple(jax.device_put(full, layout) for _ in range(arrays))
        on_each = jax.shard_map(
            function, mesh=self.mesh, in_specs=(spec,), out_specs=spec, check_vma=False
        )
        donated = 0 if arrays else ()
        compiled = jax.jit(on_each, donate_argnums=donated).lower(operands).compile()

        def run() -> None:
            nonlocal operands
            result = jax.block_until_ready(compiled(operands))
            operands = result if arrays else operands

        run()
        return run

    def seconds(
        self, function: Callable[[Any], Any], shape: tuple[int, ...], *, arrays: int = 0
    ) -> float:
        """Of the fastest of several runs: other processes share the cores."""
        return _fastest(self.prepared(function, shape, arrays=arrays))


def _fastest(run: Callable[[], Any]) -> float:
    fastest, end = float("inf"), time.perf_counter() + 0.08
    for count in range(100):
        if count >= 3 and time.perf_counter() > end:
            break
        fastest = min(fastest, _timed(run))
    return fastest


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
