"""Many programs, in several processes.

Each process compiles thousands of XLA programs, which it keeps; so it ends after some and another
takes its place. Most programs need one device; every third task uses a mesh of eight.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

from . import snippet

PART = 480
"""Programs per task of a process."""
TASKS = 4
"""Tasks after which a process is replaced."""
MESHES = ((), (), (8,), (), (), (2, 4), (), (), (4, 2), (), (), (2, 2, 2))
"""The mesh of one task after the other; most programs run on one device."""
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)
"""XLA compiles with less care for the speed of the result; what it computes is the same."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        seed: another one, other programs.
        first: number of the first program.
        programs: how many.
        minutes: start nothing after so many, or None.
        processes: how many at a time.
        faults: start nothing after so many.
        out: folder for programs that differ.
        optimized: compile as for users.
    """

    seed: int
    first: int = 0
    programs: int = 20_000
    minutes: float | None = None
    processes: int = 2
    faults: int = 20
    out: str = "out/fuzz"
    optimized: bool = False


def fuzz(plan: Plan) -> int:
    """Run the programs of a plan and print what differs; 0 if nothing does."""
    command = f"python -m fuzz --seed {plan.seed} --programs {plan.programs} --first {plan.first}"
    print(f"{plan.programs} programs, seed {plan.seed}: {command}", flush=True)
    started = time.monotonic()
    done = faults = 0
    stop = plan.first + plan.programs
    parts = [range(first, min(first + PART, stop)) for first in range(plan.first, stop, PART)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        plan.processes,
        mp_context=context,
        initializer=_start,
        initargs=(plan.optimized,),
        max_tasks_per_child=TASKS,
    ) as pool:
        waiting = [pool.submit(_task, plan.seed, part) for part in parts]
        for finished in concurrent.futures.as_completed(waiting):
            if finished.cancelled():
                continue
            ran, found = finished.result()
            done += ran
            faults += len(found)
            for name, text in found:
                _save(Path(plan.out), name, text)
                print(text, flush=True)
            minutes = (time.monotonic() - started) / 60
            print(f"{done} programs, {faults} differ, {minutes:.1f} min", flush=True)
            late = plan.minutes is not None and minutes > plan.minutes
            if late or faults >= plan.faults:
                for task in waiting:
                    task.cancel()
    return 1 if faults else 0


def _save(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def _start(optimized: bool) -> None:
    """Prepare a process: 8 virtual CPU devices, before JAX's backend starts."""
    if not optimized:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import torch

    torch.set_num_threads(1)


def _task(seed: int, numbers: range) -> tuple[int, list[tuple[str, str]]]:
    from .search import Search, run

    found: list[tuple[str, str]] = []

    def report(fault) -> None:
        name = f"seed_{fault.seed}_program_{fault.number}"
        found.append((name, snippet.of(fault)))

    mesh = MESHES[numbers.start // PART % len(MESHES)]
    ran, _ = run(Search(seed, mesh=mesh), numbers, report=report)
    return ran, found
