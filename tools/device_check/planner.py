"""The planner's estimates of the training steps, compared with what was measured.

Depth "trace" needs no compiler; depth "compile" runs the compiler of the device. A compiler that is
not installed, or takes longer than the section has, is recorded and is not a failure.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

import isoshard as iso
from isoshard.planner.machine.chips import chip_of_kind
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.targets import CompilationTimeoutError, CompilerMissingError

from . import workloads
from .part import error_record

DEPTHS = ("trace", "compile")
RESERVE = 5
"""Seconds between the time limit of the last compilation and that of the section."""


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Estimate each step, at depth "trace" first.

    Args:
        part: the section's only part.
        options: of the check; "measured" are the results of the contestant "isoshard" by model.
        save: receives the estimates by depth and model.
    """
    machine = topology(f"{chip_of_kind(options['kind']).name}:1")
    mesh = machine.mesh((1,), ("data",))
    ends = time.monotonic() + options["seconds"] - RESERVE
    results: dict[str, dict[str, Any]] = {depth: {} for depth in DEPTHS}
    for depth, name in itertools.product(DEPTHS, options["models"]):
        left = ends - time.monotonic()
        try:
            if left <= 0:
                raise CompilationTimeoutError(f"the {options['seconds']:.0f} s are over")
            measured = options["measured"].get(name, {})
            results[depth][name] = estimate(name, options["device"], mesh, depth, left, measured)
        except (CompilerMissingError, CompilationTimeoutError) as error:
            results[depth][name] = {"skipped": str(error)}
        except Exception as error:
            results[depth][name] = {"error": error_record(error)}
        save(depths=results)


def estimate(
    name: str, device: str, mesh: Mesh, depth: Any, seconds: float, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Estimate one step.

    Args:
        name: of the model.
        device: "cpu" or "gpu".
        mesh: of one described device.
        depth: one of `DEPTHS`.
        seconds: time limit of a compilation.
        measured: results of the contestant "isoshard"; empty if there are none.

    Returns:
        "ms" and "peak_bytes" as predicted; "time_ratio" and "memory_ratio", predicted over
        measured, None without a measurement; "seconds" that the estimate took.
    """
    problem = workloads.problem(name, device)
    module, batch = workloads.on_meta(problem)
    optimizer = problem.optimizer(module.parameters())

    def step(*batch: Any) -> Any:
        return problem.step(module, optimizer, *batch)

    report = iso.planner.estimate(
        step, batch, mesh, depth=depth, timeout=seconds, progress=False, cache=False
    )
    predicted_ms, predicted_bytes = report.time.overlapped * 1e3, report.memory.peak
    measured_ms = measured.get("median_ms")
    measured_bytes = measured.get("peak_bytes") or measured.get("program_bytes")
    return {
        "ms": predicted_ms,
        "peak_bytes": predicted_bytes,
        "time_ratio": predicted_ms / measured_ms if measured_ms else None,
        "memory_ratio": predicted_bytes / measured_bytes if measured_bytes else None,
        "seconds": report.seconds_taken,
    }
