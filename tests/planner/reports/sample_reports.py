"""Reports written by hand: one that fits, and one that does not."""

from __future__ import annotations

import dataclasses

from isoshard.planner.reports.report import (
    CollectiveUse,
    InputUse,
    LiveArray,
    MemoryEstimate,
    Report,
    TimeEstimate,
    TimelineEvent,
)

GIB = 1 << 30
UP, DOWN = "llama.py:41 (forward)", "llama.py:43 (forward)"
LAYERS = 32


def timeline() -> tuple[TimelineEvent, ...]:
    """Forward and backward of 32 layers, then the optimizer."""
    events, at, live = [], 0.0, 4 * GIB

    def add(kind, axes, seconds, memory, line):
        nonlocal at
        events.append(TimelineEvent(kind, axes, at, seconds, memory, line))
        at += seconds

    for layer in range(2 * LAYERS):
        forward = layer < LAYERS
        live += int((0.2 if forward else -0.2) * GIB)
        add("all-gather", ("data",), 0.002, live, UP)
        add("compute", (), 0.006 if forward else 0.012, live, UP if layer % 2 else DOWN)
        add("all-reduce", ("model",), 0.001, live, DOWN)
        if not forward:
            add("reduce-scatter", ("data",), 0.002, live, UP)
    add("compute", (), 0.01, live, "train.py:12 (step)")
    return tuple(events)


def fitting(**changes) -> Report:
    """A Llama of 8B on 256 v5e by FSDP and tensor parallelism."""
    events = timeline()
    busy = sum(event.seconds for event in events if event.what == "compute")
    data = sum(event.seconds for event in events if "data" in event.axes)
    model = sum(event.seconds for event in events if "model" in event.axes)
    report = Report(
        step="train_step",
        framework="torch",
        depth="partition",
        topology="v5e:16x16",
        mesh={"data": 16, "model": 16},
        plan="Plan.fsdp('data') * Plan.tensor_parallel('model')",
        memory=MemoryEstimate(
            parameters=int(0.5 * GIB),
            buffers=1 << 20,
            optimizer=int(1.5 * GIB),
            inputs=4 << 20,
            activations=int(8.4 * GIB),
            peak=int(10.4 * GIB) + (5 << 20),
            peak_line=UP,
            largest=(
                LiveArray("dot_general", (8, 4096, 4096), "bfloat16", 256 << 20, UP),
                LiveArray("exp_avg.layers.0.mlp.up_proj.weight", (896, 256), "float32", 917504, ""),
            ),
            capacity=16_000_000_000,
        ),
        collectives=(
            CollectiveUse("all-gather", ("data",), 54 << 20, 64, UP, 0.128, "bfloat16"),
            CollectiveUse("reduce-scatter", ("data",), 54 << 20, 32, UP, 0.064, "bfloat16"),
            CollectiveUse("all-reduce", ("model",), 64 << 20, 64, DOWN, 0.064, "bfloat16"),
            CollectiveUse("all-reduce", ("data", "model"), 4, 1, "train.py:9 (step)", 1e-5, "f32"),
        ),
        flops=5.6e13,
        bytes_moved=3.1e11,
        time=TimeEstimate(
            compute=0.45,
            memory=0.38,
            busy=busy,
            collectives={"data": data, "model": model, "data+model": 1e-5},
            serial=busy + data + model + 1e-5,
            overlapped=busy + 0.02,
            utilisation=0.47,
            limit="compute",
            assumptions=("collectives hide behind computing of the same layer",),
        ),
        advice=("all is well",),
        timeline=events,
        seconds_taken=3.4,
        versions={"jax": "0.10.2", "jaxlib": "0.10.2"},
        inputs=(
            InputUse("optimizer", "float32", ("data", "model"), (), int(1.5 * GIB), 450),
            InputUse("parameter", "bfloat16", ("data", "model"), (), int(0.5 * GIB), 225),
            InputUse("parameter", "bfloat16", (), ("data", "model"), 1 << 20, 65),
            InputUse("input", "int64", ("data",), ("model",), 4 << 20, 2),
        ),
        assumptions=("a while loop is counted as one run",),
    )
    return dataclasses.replace(report, **changes)


def too_large(**changes) -> Report:
    """The same by data parallelism alone on 8 H100: over the memory, with everything replicated."""
    base = fitting()
    report = dataclasses.replace(
        base,
        depth="trace",
        topology="h100:2x8",
        mesh={"data": 16},
        plan="Plan.data_parallel('data')",
        memory=dataclasses.replace(
            base.memory,
            parameters=30 * GIB,
            optimizer=60 * GIB,
            activations=40 * GIB,
            peak=130 * GIB + (5 << 20),
            capacity=80_000_000_000,
        ),
        collectives=(CollectiveUse("all-reduce", ("data",), 30 * GIB, 1, UP, 1.3, "float32"),),
        time=dataclasses.replace(
            base.time, busy=0.6, collectives={"data": 1.3}, serial=1.9, overlapped=1.4, limit="data"
        ),
        inputs=(
            InputUse("optimizer", "float32", (), ("data",), 60 * GIB, 450),
            InputUse("parameter", "float32", (), ("data",), 30 * GIB, 225),
            InputUse("input", "int64", ("data",), (), 4 << 20, 2),
        ),
    )
    return dataclasses.replace(report, **changes)
