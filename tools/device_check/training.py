"""Training steps of four models: hand-written JAX, `xs.compile`, torch eager and `torch.compile`.

Each contestant is a part and so has its own process, for two reasons: JAX reports the peak of its
memory since the process started, and the allocators of JAX and torch would compete for the GPU.
They therefore do not take turns, as those of `benchmarks.training` do; medians over rounds are
steady on a GPU that runs nothing else. The processes of plain torch do not load isoshard's device.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from benchmarks.by_hand.step import Training, make_mesh
from benchmarks.contestant import Contestant, peak_bytes
from benchmarks.models.problem import Problem

from . import workloads
from .part import error_record

LOSSES = 4
"""First steps whose losses are compared."""

ROUNDS = {"gpu": 15, "cpu": 2}
STEPS = {"gpu": 5, "cpu": 1}
"""Steps of a round, at whose end the loss is read, as a training loop logs it."""

TORCH_COMPILE_ON_CPU = ("mlp",)
"""Models of the contestant `torch.compile` on the CPU, where only its code path is tested."""


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Measure one contestant on each model, also after a failure.

    Args:
        part: one of `CONTESTANTS`.
        options: of the check; "models" are names of `sections.MODELS`.
        save: receives the results by model.
    """
    reduced = part == "torch.compile" and options["device"] == "cpu"
    results = {}
    for name in TORCH_COMPILE_ON_CPU if reduced else options["models"]:
        try:
            results[name] = measure(part, name, options)
        except Exception as error:
            results[name] = {"error": error_record(error)}
        save(models=results)
        gc.collect()  # frees the arrays of this model before the next one is built
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(part: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train a model and time its steps.

    Args:
        part: one of `CONTESTANTS`.
        name: of the model.
        options: of the check.

    Returns:
        "losses" of the first steps; "first_seconds", their time including compilation; "median_ms"
        and "best_ms" of a step; "flops" of a step and "mfu"; "peak_bytes" of the device and
        "program_bytes" by XLA's account. None stands for what cannot be measured.
    """
    device = options["device"]
    problem = workloads.problem(name, device)
    peak_before = _peak(part)
    started = time.perf_counter()
    contestant = CONTESTANTS[part](name, device)
    losses = contestant.curve(0, LOSSES)
    first_seconds = time.perf_counter() - started
    train = contestant.steps(STEPS[device])
    train()
    times = []
    for _ in range(ROUNDS[device]):
        started = time.perf_counter()
        train()
        times.append((time.perf_counter() - started) / STEPS[device])
    median = statistics.median(times)
    flops, peak_rate = workloads.flops(problem), workloads.peak_flops(options["kind"])
    peak = _peak(part)
    return {
        "losses": losses,
        "first_seconds": first_seconds,
        "median_ms": median * 1e3,
        "best_ms": min(times) * 1e3,
        "rounds": len(times),
        "flops": flops,
        "mfu": flops / median / peak_rate if peak_rate else None,
        # JAX's peak is that of the process. If it did not rise, that of an earlier model is higher.
        "peak_bytes": None if part in ON_JAX and peak == peak_before else peak,
        "program_bytes": peak_bytes(contestant.memory()) if contestant.memory else None,
    }


def _peak(part: str) -> int | None:
    """The peak of the device's memory in bytes; None on a CPU, where no allocator counts it."""
    if part in ON_JAX:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _jax(name: str, device: str) -> Contestant:
    """The hand-written step under `jax.jit`."""
    training = Training(workloads.by_hand(name, device), make_mesh((1, 1)))
    memory = training.compiled.memory_analysis
    return Contestant("jax", training.run, training.batch, memory=memory)


def _isoshard(name: str, device: str) -> Contestant:
    """The torch step on the `jax` device under `xs.compile`."""
    import isoshard.torch_bridge as xs

    problem = workloads.problem(name, device)
    module = problem.module().to("jax")
    optimizer = problem.optimizer(module.parameters())
    step = xs.compile(lambda *batch: problem.step(module, optimizer, *batch))
    return Contestant(
        "isoshard",
        step,
        lambda number: tuple(tensor.to("jax") for tensor in problem.tensors(number)),
        memory=lambda: xs.memory_analysis(step),
    )


def _torch(name: str, device: str) -> Contestant:
    """The torch step, eager."""
    return _plain("torch", workloads.problem(name, device), device)


def _torch_compile(name: str, device: str) -> Contestant:
    """The torch step, its model under `torch.compile`."""
    # On a CPU inductor would run a C++ compiler for minutes.
    backend = "aot_eager" if device == "cpu" else "inductor"
    compile_model = functools.partial(torch.compile, backend=backend)
    return _plain("torch.compile", workloads.problem(name, device), device, compile_model)


def _plain(
    name: str, problem: Problem, device: str, wrap: Callable[..., Any] = lambda module: module
) -> Contestant:
    torch_device = "cuda" if device == "gpu" else "cpu"
    if torch_device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    module = problem.module().to(torch_device)
    optimizer = problem.optimizer(module.parameters())
    model = wrap(module)
    return Contestant(
        name,
        lambda *batch: problem.step(model, optimizer, *batch),
        lambda number: tuple(tensor.to(torch_device) for tensor in problem.tensors(number)),
    )


ON_JAX = ("jax", "isoshard")
CONTESTANTS: dict[str, Callable[[str, str], Contestant]] = {
    "jax": _jax,
    "isoshard": _isoshard,
    "torch": _torch,
    "torch.compile": _torch_compile,
}
