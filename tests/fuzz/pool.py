"""Many programs, in several processes.

Each process compiles thousands of XLA programs, which it keeps; so it ends after some and another
takes its place. Most programs need one device; every third task uses a mesh of eight.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.harness.workers import Lost, answers
from tools.harness.xla_flags import quick_variables

if TYPE_CHECKING:
    from .search import Search

PART = 480
"""Programs per task of a process."""
TASKS = 4
"""Tasks of a process; then another takes its place."""
LIMIT = 3600
"""Seconds for one task, with the making smaller of what differs; it has never been reached."""
MESHES = ((), (), (8,), (), (4,), (2, 4), (), (), (4, 2), (2, 4), (), (2, 2, 2))
"""The mesh of one task after the other; most programs run on one device."""
UNEVEN = (4, 9)
"""Which of these have their tensors in blocks of any sizes."""
FATAL = "_fatal"
"""Ends the name of a program that ends the process in which it runs."""
Found = tuple[int, list[tuple[str, str]]]
"""How many programs ran, and name and text of each that differs."""
Function = Callable[[int, range], Any]
MEMORY = 8 << 30
"""Bytes that a process may take; a program that wants more ends it, not the machine."""


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
        layouts: only programs whose results lie in any layout; see `layouts`.
    """

    seed: int
    first: int = 0
    programs: int = 20_000
    minutes: float | None = None
    processes: int = 2
    faults: int = 20
    out: str = "out/fuzz"
    optimized: bool = False
    layouts: bool = False


def fuzz(plan: Plan) -> int:
    """Run the programs of a plan and print what differs; 0 if nothing does."""
    command = (
        f"python -m tests.fuzz --seed {plan.seed} --programs {plan.programs} --first {plan.first}"
    )
    command += " --layouts" if plan.layouts else ""
    print(f"{plan.programs} programs, seed {plan.seed}: {command}", flush=True)
    started = time.monotonic()
    done = faults = 0
    for ran, found in _found(plan, _parts(plan)):
        done += ran
        for name, text in found:
            if not plan.optimized and not _differs_for_users(plan, name):
                print(f"{name} differs only where XLA does not optimise: not counted")
                continue
            faults += 1
            _save(Path(plan.out), name, text)
            print(text, flush=True)
        minutes = (time.monotonic() - started) / 60
        print(f"{done} programs, {faults} differ, {minutes:.1f} min", flush=True)
        if faults >= plan.faults or (plan.minutes is not None and minutes > plan.minutes):
            break
    print(f"fuzz: {done - faults} passed, {faults} failed", flush=True)  # as test runners end
    return 1 if faults else 0


def _differs_for_users(plan: Plan, name: str) -> bool:
    """Whether a program that was found differs when XLA compiles it as it does for users."""
    number = int(name.removesuffix(FATAL).rpartition("_")[2])
    again = dataclasses.replace(plan, optimized=True)
    return any(found for _, found in _found(again, [range(number, number + 1)]))


def _parts(plan: Plan) -> list[range]:
    """The tasks; they end at multiples of PART, so that a number always goes with the same mesh."""
    stop = plan.first + plan.programs
    edges = [plan.first, *range((plan.first // PART + 1) * PART, stop, PART), stop]
    return [range(*pair) for pair in itertools.pairwise(edges)]


def _found(plan: Plan, parts: list[range]) -> Iterator[Found]:
    """What each task found, as it ends."""
    task = functools.partial(_task, layouts=plan.layouts)
    for part, answer in _answers(plan, task, parts, plan.processes):
        yield answer if not isinstance(answer, Lost) else _alone(plan, part, task)


def _answers(
    plan: Plan, function: Function, parts: list[range], processes: int
) -> Iterator[tuple[range, Any]]:
    """What a function returns for parts of the numbers, in new processes."""
    found = answers(
        [(plan.seed, part) for part in parts],
        _start,
        jobs=processes,
        limit=LIMIT,
        each=TASKS,
        options={"function": function, "optimized": plan.optimized},
    )
    return ((part, answer) for (_, part), answer in found)


def _alone(plan: Plan, numbers: range, task: Function) -> Found:
    """Run programs in a process of their own; if it ends, look for the one that ends it."""
    ((_, found),) = _answers(plan, task, [numbers], 1)
    if not isinstance(found, Lost):
        return found
    middle = (numbers.start + numbers.stop) // 2
    halves = [range(numbers.start, middle), range(middle, numbers.stop)]
    results = [_alone(plan, half, task) for half in halves if len(numbers) > 1]
    faults = [fault for _, found in results for fault in found]
    fatal = any(name.endswith(FATAL) for name, _ in faults)
    if not fatal:  # it is this program, or these together
        name = f"seed_{plan.seed}_program_{numbers.start}{FATAL}"
        shown = functools.partial(_text, layouts=plan.layouts)
        ((_, text),) = _answers(plan, shown, [numbers], 1)
        if isinstance(text, Lost):
            text = f"# {name}: making it ends the process as well"
        faults.append((name, text))
    return len(numbers), faults


def _save(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def _start(function: Function, optimized: bool) -> Function:
    """Prepare a process: its memory, and 8 virtual CPU devices before JAX's backend starts.

    XLA compiles with less care for the speed of the result. What it computes should be the same; a
    program that differs is run again as users compile it, and counts if it differs there.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    if not optimized:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ |= quick_variables(importlib.metadata.version("jax"), flags)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import torch

    torch.set_num_threads(1)
    return function


def _task(seed: int, numbers: range, layouts: bool = False) -> Found:
    from . import snippet
    from .search import run

    found: list[tuple[str, str]] = []

    def report(fault) -> None:
        name = f"seed_{fault.seed}_program_{fault.number}"
        found.append((name, snippet.of(fault)))

    ran, _ = run(_search(seed, numbers, layouts), numbers, report=report)
    return ran, found


def _text(seed: int, numbers: range, layouts: bool = False) -> str:
    """Programs that end the process in which they run."""
    from . import snippet
    from .search import Fault

    search = _search(seed, numbers, layouts)
    made = [(number, search.program(number)) for number in numbers]
    return "\n".join(
        snippet.of(Fault(number, seed, program, "it ends the process"))
        for number, program in made
        if program is not None
    )


def _search(seed: int, numbers: range, layouts: bool) -> Search:
    """What makes the programs of a task."""
    from .search import Search

    if layouts:
        return Search(seed, layouts=True)
    number = numbers.start // PART % len(MESHES)
    return Search(seed, mesh=MESHES[number], uneven=number in UNEVEN)
