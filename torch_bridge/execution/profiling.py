"""Traces of programs, and what a compiled step costs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from isoshard.core import extensions
from isoshard.core.runtime import formatting, trace_scopes
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.torch_bridge.engine.capture.step import CompiledStep
from isoshard.torch_bridge.engine.compiling import program

from .runtime import last_replay, sync


@contextlib.contextmanager
def profile(directory: str | os.PathLike[str], **options: Any) -> Iterator[None]:
    """Context that traces what the devices do, by `jax.profiler.trace`.

    Besides what JAX writes for TensorBoard and XProf there is `perfetto_trace.json.gz`, for
    https://ui.perfetto.dev. Each operation has the path of its module and the lines of user code,
    `Net/layers.3.q_proj/train.py:41 (step)/dot_general`, `backward/..` if it computes a gradient.
    (XLA writes these names itself on TPUs and GPUs, also in traces by other tools. On CPUs they are
    added here, to the Perfetto trace.) What is recorded when the context ends is executed in it.

    Args:
        directory: where the trace goes.
        options: further arguments of `jax.profiler.trace`.

    Raises:
        RuntimeError: another trace is being written.

    Example:
        >>> import gzip, json, pathlib, tempfile, torch, isoshard.torch_bridge as xs
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("jax")
        >>> x = torch.ones(2, 4, device="jax")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with xs.profile(folder):
        ...         y = net(x)
        ...     (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
        ...     events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        >>> any("hlo_op" in event.get("args", {}) for event in events)
        True
    """
    sync(wait=True)
    runs: list[program.Program] = []

    def watch(ran: program.Program, _: Any) -> None:
        runs.append(ran)

    before = set(_traces(directory))
    program.WATCHING.append(watch)
    try:
        with jax.profiler.trace(os.fspath(directory), create_perfetto_trace=True, **options):
            yield
            sync(wait=True)
    finally:
        program.WATCHING.remove(watch)
    texts: dict[int, str] = {}
    for ran in runs:
        if id(ran) not in texts:
            texts[id(ran)] = ran.text()
    for path in _traces(directory):
        if path not in before:
            trace_scopes.name_trace(path, [texts[id(ran)] for ran in runs])


def _traces(directory: str | os.PathLike[str]) -> list[Path]:
    return sorted(Path(directory).rglob("perfetto_trace.json.gz"))


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one run of a compiled step costs; printed, a table.

    Attributes:
        devices: how many devices run it.
        flops: floating-point operations of all devices, as XLA counts them; the body of a loop
            counts once.
        bytes_accessed: bytes of memory read and written by all devices, as XLA counts them.
        memory: bytes on each device, by cause: "arguments", "results" (without those that replace
            an argument), "temporaries", "code".
        collectives: of each kind of collective the bytes of its results on one device, and how many
            one run executes.
        seconds: time of one run; None if it has run less than three times.
        peak_flops: of one device, operations a second; None if it is not known.
        tokens: in one run, as they were passed; None without.

    Example:
        >>> memory = {"arguments": 4096, "results": 0, "temporaries": 1024, "code": 0}
        >>> costs = StepReport(8, 4e12, 1e9, memory, {}, 0.5, 2e12, tokens=1000)
        >>> costs.mfu, costs.tokens_per_second
        (0.5, 2000.0)
    """

    devices: int
    flops: float
    bytes_accessed: float
    memory: Mapping[str, int]
    collectives: Mapping[str, tuple[int, int]]
    seconds: float | None
    peak_flops: float | None
    tokens: int | None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: of the devices' peak, from 0 to 1; None if it is not known."""
        if self.seconds is None or self.peak_flops is None:
            return None
        return self.flops / self.seconds / (self.peak_flops * self.devices)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second; None without `tokens` or a time."""
        if self.tokens is None or self.seconds is None:
            return None
        return self.tokens / self.seconds

    def __str__(self) -> str:
        """A table."""
        human = formatting.human_bytes
        rows = [
            ["devices", str(self.devices)],
            ["flops", formatting.human_flops(self.flops)],
            ["bytes accessed", human(self.bytes_accessed)],
        ]
        if self.seconds is not None:
            rows.append(["time of a run", formatting.human_seconds(self.seconds)])
        rate, mfu = self.tokens_per_second, self.mfu
        if rate is not None:
            rows.append(["tokens/s", f"{rate:,.0f}"])
        if mfu is not None:
            rows.append(["MFU", f"{mfu:.1%}"])
        rows += [[f"memory: {cause}", human(size)] for cause, size in self.memory.items()]
        rows += [
            [kind, f"{human(size)}, {formatting.count_of(count, 'run')}"]
            for kind, (size, count) in self.collectives.items()
        ]
        return "\n".join(formatting.table(rows))


def report(
    step: CompiledStep,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    peak_flops: float | None = None,
) -> StepReport:
    """What the program costs that a compiled step ran last.

    Args:
        step: made by `compile`.
        tokens: in one run, over all devices, for tokens a second.
        seconds: of one run; by default the median time from one run to the next, of the last 64, so
            call it in a loop that keeps the devices busy.
        peak_flops: operations a second of one device; by default the planner's rate of the attached
            chip for bfloat16, and none for chips that it does not list.

    Returns:
        Operations, bytes, memory by cause, collectives, time, tokens a second and MFU.

    Raises:
        RuntimeError: the step was not captured yet.
        ValueError: `tokens`, `seconds` or `peak_flops` is not positive.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> w = torch.ones(64, 64, device="jax")
        >>> step = xs.compile(lambda x: x @ w)
        >>> _ = step(torch.ones(32, 64, device="jax"))
        >>> costs = xs.report(step, tokens=32, seconds=1e-3, peak_flops=1e9)
        >>> costs.flops, costs.tokens_per_second, round(costs.mfu, 3)
        (262144.0, 32000.0, 0.262)
        >>> costs.memory["arguments"]
        24576
    """
    for name, number in (("tokens", tokens), ("seconds", seconds), ("peak_flops", peak_flops)):
        if number is not None and number <= 0:
            raise ValueError(f"xs.report: {name}={number} is not positive; leave it out or measure")
    ran = last_replay(step).program
    device = next(iter(jax.tree.leaves(ran.compiled.output_shardings)[0].device_set))
    devices = max(
        len(sharding.device_set)
        for sharding in jax.tree.leaves(
            (ran.compiled.input_shardings, ran.compiled.output_shardings)
        )
    )
    analysis = ran.compiled.cost_analysis() or {}
    costs = analysis[0] if isinstance(analysis, list) else analysis
    memory = ran.compiled.memory_analysis()
    causes = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    sent: dict[str, tuple[int, int]] = {}
    for collective in collectives(ran.text()):
        size, count = sent.get(collective.kind, (0, 0))
        times = collective.times
        sent[collective.kind] = size + collective.bytes * times, count + times
    return StepReport(
        devices=devices,
        flops=float(costs.get("flops", 0.0)) * devices,
        bytes_accessed=float(costs.get("bytes accessed", 0.0)) * devices,
        memory=causes,
        collectives=sent,
        seconds=_interval(ran) if seconds is None else seconds,
        peak_flops=extensions.peak_flops(device.device_kind) if peak_flops is None else peak_flops,
        tokens=tokens,
    )


def _interval(ran: program.Program) -> float | None:
    """The median time from one run of a program to the next; without the first, which loads it."""
    starts = list(ran.starts)[1:]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    return statistics.median(gaps) if gaps else None
