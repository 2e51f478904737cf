"""torch_xla's counters and metrics, out of isoshard's own.

    import torch_xla.debug.metrics as met

| torch_xla's name | what it is here |
|---|---|
| `CompileTime` | seconds of each compilation |
| `ExecuteTime`, in SPMD mode `ExecuteReplicatedTime` | until a program was started; it runs on |
| `TransferToDeviceTime` | seconds to send an array |
| `TransferFromDeviceTime` | seconds to read one, and to wait until it is computed |
| `OutboundData`, `InboundData` | bytes sent to, and read from, the devices |
| `InputOutputAliasCount` | inputs whose memory results may take, of each program with any |
| `UncachedCompile`, `CachedCompile` | programs compiled, and runs of programs compiled before |
| `ExecuteComputation`, in SPMD mode `ExecuteReplicated` | programs run |
| `MarkStep` | calls of `sync` |
| `CompileWithAutoSharding` | programs compiled, after `use_spmd(auto=True)` |
| `ReplicateShardedData` | reads of tensors on several devices, by a script of the drop-in |
| `CreateOpSharding` | layouts that a mesh was asked for, each once |
| `VirtualDeviceUsage` | tensors marked by a script of the drop-in |
| `aten::nonzero`, .. | operators that ran on the CPU: their results' shapes depend on values |
| `isoshard::copies`, .. | the counters of `isoshard.metrics` that torch_xla has no name for |

torch_xla also counts every operator it records (`xla::add`); that is not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from isoshard.core.kit import clear as clear_metrics  # noqa: F401
from isoshard.core.kit import metrics, samples
from isoshard.core.kit import reset as clear_all  # noqa: F401
from isoshard.core.kit import reset_counters as clear_counters  # noqa: F401
from isoshard.torch_bridge.kit import auto_spmd, is_spmd

_TIMES = {
    "CompileTime": "compile_seconds",
    "ExecuteTime": "execute_seconds",
    "ExecuteReplicatedTime": "execute_seconds",
    "TransferToDeviceTime": "host_to_device_seconds",
    "TransferFromDeviceTime": "device_to_host_seconds",
}
_SIZES = {"OutboundData": "host_to_device_bytes", "InboundData": "device_to_host_bytes"}
_NUMBERS = {"InputOutputAliasCount": "donated_inputs"}
_COUNTS = {
    "MarkStep": "syncs",
    "ReplicateShardedData": "reads_of_shards",
    "CreateOpSharding": "op_shardings",
    "VirtualDeviceUsage": "marks",
}
_NAMED = ("executions", "compilations", "fallbacks", *_COUNTS.values())
_PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)


def _counters() -> dict[str, int]:
    """Every counter that is not zero."""
    counts = {name: amount for name, amount in metrics.counters().items() if amount}
    runs, compiled = counts.get("executions", 0), counts.get("compilations", 0)
    named = {
        "CachedCompile": max(runs - compiled, 0),
        "UncachedCompile": compiled,
        "ExecuteReplicated" if is_spmd() else "ExecuteComputation": runs,
        "CompileWithAutoSharding": compiled if auto_spmd() else 0,
    }
    named |= {name: counts.get(own, 0) for name, own in _COUNTS.items()}
    named |= _fallbacks()
    for name, amount in counts.items():
        if name.partition(".")[0] not in _NAMED:
            named[f"isoshard::{name}"] = amount
    return {name: amount for name, amount in named.items() if amount}


def _fallbacks() -> dict[str, int]:
    """How often each operator ran on the CPU."""
    counts: dict[str, int] = {}
    for name, amount in metrics.counters().items():
        kind, _, operator = name.partition(".")
        if kind == "fallbacks" and operator:
            operator = operator if "::" in operator else "aten::index.Tensor"
            counts[operator] = counts.get(operator, 0) + amount
    return counts


def _metrics() -> dict[str, samples.Series]:
    """Every metric with a sample: times in nanoseconds, sizes in bytes, and numbers."""
    series = samples.series()
    other = "ExecuteTime" if is_spmd() else "ExecuteReplicatedTime"
    times = {
        name: _scaled(series[own], 1e9)
        for name, own in _TIMES.items()
        if own in series and name != other
    }
    others = _SIZES | _NUMBERS
    return times | {name: series[own] for name, own in others.items() if own in series}


def _scaled(series_: samples.Series, factor: float) -> samples.Series:
    latest = tuple((when, value * factor) for when, value in series_.latest)
    return samples.Series(series_.count, series_.total * factor, latest)


def counter_names() -> list[str]:
    """The names of the counters that are not zero."""
    return list(_counters())


def counter_value(name: str) -> int | None:
    """A counter.

    Args:
        name: its name.

    Returns:
        The count; None if nothing was counted.
    """
    return _counters().get(name)


def metric_names() -> list[str]:
    """The names of the metrics that have a sample."""
    return list(_metrics())


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """A metric.

    Args:
        name: its name; `ExecuteTime` and `ExecuteReplicatedTime` are one.

    Returns:
        The number of samples, their sum, and the latest of them as (seconds since the epoch,
        value); None if there is none. Times are in nanoseconds, sizes in bytes.
    """
    execute = "ExecuteReplicatedTime" if is_spmd() else "ExecuteTime"
    series_ = _metrics().get(execute if name.startswith("Execute") else name)
    return None if series_ is None else (series_.count, series_.total, series_.latest)


def metrics_report() -> str:
    """Every metric and counter, as text."""
    return _report(_metrics(), _counters())


def short_metrics_report(
    counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None
) -> str:
    """Some metrics and counters, and every operator that ran on the CPU, as text.

    Args:
        counter_names: by default `CachedCompile` and `MarkStep`.
        metric_names: by default the five times.
    """
    counters_ = counter_names or ("CachedCompile", "MarkStep")
    times = metric_names or tuple(_TIMES)
    counters_ = {*counters_, *_fallbacks()}
    counters = {name: amount for name, amount in _counters().items() if name in counters_}
    return _report({n: series_ for n, series_ in _metrics().items() if n in times}, counters)


def executed_fallback_ops() -> list[str]:
    """The operators that ran on the CPU."""
    return list(_fallbacks())


def _report(metrics_: dict[str, samples.Series], counters: dict[str, int]) -> str:
    lines = []
    for name, series_ in metrics_.items():
        write = _size if name in _SIZES else _formatted if name in _NUMBERS else _time
        values = sorted(value for _, value in series_.latest)
        ranks = {p: values[min(len(values) * p // 100, len(values) - 1)] for p in _PERCENTILES}
        lines += [
            f"Metric: {name}",
            f"  TotalSamples: {series_.count}",
            f"  Accumulator: {write(series_.total)}",
            *_rates(series_, write),
            "  Percentiles: " + "; ".join(f"{p}%={write(v)}" for p, v in ranks.items()),
        ]
    for name, amount in counters.items():
        lines += [f"Counter: {name}", f"  Value: {amount}"]
    return "\n".join([*lines, ""])


def _rates(series_: samples.Series, write: object) -> list[str]:
    """How much and how many a second, over the time of the samples that are kept."""
    passed = series_.latest[-1][0] - series_.latest[0][0]
    if passed <= 0 or not callable(write):
        return []
    recent = sum(value for _, value in series_.latest)
    return [
        f"  ValueRate: {write(recent / passed)} / second",
        f"  Rate: {len(series_.latest) / passed:.6g} / second",
    ]


_UNITS = (("d", 86400e9), ("h", 3600e9), ("m", 60e9), ("s", 1e9), ("ms", 1e6))


def _time(nanoseconds: float) -> str:
    """Such as `126ms456.036us`, the way torch_xla's reports are parsed."""
    text, rest = "", nanoseconds
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count or text:
            text += f"{int(count):0{3 if unit == 'ms' else 2}d}{unit}"
    return f"{text}{rest / 1e3:07.3f}us"


def _formatted(amount: float) -> str:
    """Such as `3.00`."""
    return f"{amount:.2f}"


def _size(size: float) -> str:
    """Such as `3.27KB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f}{unit}"
        size /= 1024
    return f"{size:.2f}TB"
