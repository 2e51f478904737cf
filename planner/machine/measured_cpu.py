"""What this host's cores do, measured once in a process: the chip of virtual CPU devices.

Virtual devices share the host's cores and memory: each has its part of what all do together. So it
is measured with some devices at work at once, as XLA runs them:

- a matrix product and both of its gradients, which read their operands in other orders;
- an update of arrays that are larger than caches, as an optimizer makes it;
- each kind of collective, which is copies in memory, by how many devices talk: of eight one part
  of a gathered array is read by all, so caches serve it; in pairs each half is read by two;
- a copy in another order, as of an array that was gathered along an inner axis;
- collectives of few numbers, by how many devices meet: one after the other, and between layers of
  small operations, from which devices come at different times, so that cores idle until the last
  one is there;
- temporaries in a block that is too large for the C library to keep: then the kernel maps it anew
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
"""Bytes of one array on all devices: more than caches hold."""
_SENT = 4 * 2**20
"""Bytes of one device's result in a collective."""
_AT_WORK = 8
_MEETINGS, _TURNS = 24, 12
_WIDTH, _NARROW = 256, 64
"""Of the layer between meetings: small operations, among which cores switch between devices."""

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
            kind and by how many talk; of a reduce-scatter those of the operands. Empty if there is
            one device.
        reordered: bytes a second, read or written, of copies in another order.
        meetings: seconds of a meeting of devices that did nothing before, by how many meet.
        waits: seconds that they wait for each other besides, after `between` of work, by how many.
        between: seconds of that work.
        fresh: bytes a second of memory that is new to the process; 0 if it takes no time.
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
    """What was measured for groups of a size, or for the next larger.

    Example:
        >>> of_size({2: 1.0, 4: 3.0}, 3), of_size({2: 1.0, 4: 3.0}, 8), of_size({}, 8)
        (3.0, 6.0, 0.0)
    """
    if not measured:
        return 0.0
    largest = max(measured)
    next_size = min((one for one in measured if one >= size), default=largest)
    return measured[next_size] * (max(1, size / largest) if grows else 1)


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
    copied: dict[str, dict[int, float]] = {kind: {} for kind in _COLLECTIVES if count > 1}
    meetings, waits, between = _meetings(devices)
    for size in _sizes(count):
        group = _Bench(devices, size)
        once = group.seconds(_summed_once, (count,))
        for kind, rates in copied.items():
            taken = group.seconds(_once(kind, size), (_SENT // 4,))
            rates[size] = count * _SENT / max(taken - once, 1e-6)
    small, large = (bench.seconds(_held(bytes_), (count,)) for bytes_ in (KEPT // 2, 2 * KEPT))
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
    """What meetings take: of idle devices, and besides after a layer; and what that one takes.

    Runs with many meetings are compared with those that have two, by turns. How long devices wait
    for each other differs from run to run: the lower quartile counts. Of the work it is the fastest
    run, as in all rates, in which no core idles.
    """
    sizes, result, meetings = _sizes(len(devices)), list[dict[int, float]](), 0.0
    for layer in (_nothing, _layer):
        few, *many = (
            _Bench(devices, size).prepared(_layers(layer, every), (_WIDTH, _WIDTH))
            for size, every in ((0, _MEETINGS - 1), *((size, 1) for size in sizes))
        )
        taken = [[_timed(run) for run in (few, *many)] for _ in range(_TURNS)]
        alone, *together = zip(*taken, strict=True)
        meetings = min(alone)
        more = (max(0.0, statistics.quantiles(times)[0] - meetings) for times in together)
        result.append({size: one / (_MEETINGS - 2) for size, one in zip(sizes, more, strict=True)})
    bare, met = result
    return bare, {size: max(0.0, met[size] - bare[size]) for size in sizes}, meetings / _MEETINGS


def _layers(
    layer: Callable[[jax.Array, jax.Array], jax.Array], every: int
) -> Callable[[jax.Array], jax.Array]:
    """Layers, after which devices sum up some numbers: after the first, and then every so often."""

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


def _summed_once(x: jax.Array) -> jax.Array:
    return 0.5 * jax.lax.psum(x, _Bench.axis)


def _turned(x: jax.Array) -> jax.Array:
    """As eight parts of rows of 64 numbers lie that were gathered one behind the other."""
    return x.reshape(8, -1, 64).swapaxes(0, 1).reshape(-1)


def _held(bytes_: int) -> Callable[[jax.Array], jax.Array]:
    """A temporary of so many bytes, written once: what a loop changes has memory of its own."""

    def run(x: jax.Array) -> jax.Array:
        broadcast_to = jnp.broadcast_to(x[:1], (bytes_ // 4,))
        broadcast_to = jax.lax.fori_loop(
            0, 2, lambda at, y: y.at[at].set(y[at + 1] + 1), broadcast_to
        )
        return _one_of(broadcast_to, x)

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
    """Runs a function on all of some devices at once.

    Args:
        devices: they.
        size: of the groups in which they talk; 0 is all of them.
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
            function: of one device's array; or of several, which it gives back changed in place.
            shape: of each on one device.
            arrays: how many; 0 is one that stays.
        """
        spec = PartitionSpec(self.mesh.axis_names)
        first, *rest = shape
        full = np.ones((first * self.mesh.size, *rest), np.float32)
        layout = NamedSharding(self.mesh, spec)
        device_put = jax.device_put(full, layout)
        if arrays:
            device_put = tuple(jax.device_put(full, layout) for _ in range(arrays))
        on_each = jax.shard_map(
            function, mesh=self.mesh, in_specs=(spec,), out_specs=spec, check_vma=False
        )
        donated = 0 if arrays else ()
        compiled = jax.jit(on_each, donate_argnums=donated).lower(device_put).compile()

        def run() -> None:
            nonlocal device_put
            result = jax.block_until_ready(compiled(device_put))
            device_put = result if arrays else device_put

        run()
        return run

    def seconds(
        self, function: Callable[[Any], Any], shape: tuple[int, ...], *, arrays: int = 0
    ) -> float:
        """Of the fastest of several runs: others share the cores."""
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
