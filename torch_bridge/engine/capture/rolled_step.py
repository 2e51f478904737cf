"""A captured step with its equal layers as loops: where the stacks of such a program are found.

`assemble` has named every input and result of the step by itself. Memory that the step reads and
replaces, or only reads, may be stacked with that of other layers; then a `StackedMemory` stands for
all of it. Everything else keeps its name, under the number that it has in the rolled program.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.compiling.rolled_plan import (
    EqualMemory,
    NotRolled,
    rolled_program,
)
from isoshard.torch_bridge.engine.values.value import Storage

from .bindings import Computed, SharedMemory
from .stacked_memory import StackedMemory

Repeat = Literal["auto", "always"] | None


@dataclasses.dataclass(frozen=True)
class RunAs:
    """How a step is run.

    Attributes:
        plan: what was compiled.
        program: the executable.
        sources: for each input, where it is found.
        targets: which result is written to which place.
        made: the tensors made anew.
    """

    plan: program.CompileRequest
    program: program.Program
    sources: list[Any]
    targets: list[tuple[int, Any]]
    made: list[Computed | SharedMemory]


def rolled_step(
    plan: program.CompileRequest,
    arrays: Sequence[jax.Array],
    sources: Sequence[Any],
    targets: Sequence[tuple[int, Any]],
    made: Sequence[Computed | SharedMemory],
    where: str,
    repeat: Repeat,
) -> RunAs | None:
    """Compile a step with its equal layers as loops.

    Args:
        plan: of the step.
        arrays: its inputs.
        sources: for each input, where it is found.
        targets: which result is written to which place.
        made: the tensors made anew.
        where: the step's line, under which the metrics note what became of it.
        repeat: "auto" makes no loops that would copy too much.

    Returns:
        How it is run; None if its layers stay as they are.
    """
    times = collections.Counter([*(n for n, _ in targets), *(mark.number for mark in made)])
    written = {id(place): n for n, place in targets if times[n] == 1}
    touched = {id(place) for _, place in targets}
    donated = set(plan.donated)
    memory = {n: source for n, source in enumerate(sources) if isinstance(source, Storage)}
    replaced = {n: written[id(m)] for n, m in memory.items() if id(m) in written and n in donated}
    read = [n for n, m in memory.items() if id(m) not in touched and n not in donated]
    try:
        found, arrangement = rolled_program(plan, arrays, replaced, read, bounded=repeat == "auto")
    except NotRolled as error:
        metrics.record_repeat(where, f"not rolled: {error}")
        return None
    metrics.record_repeat(where, arrangement.text)
    stacks = {
        one.inputs: StackedMemory([sources[n] for n in one.inputs], one.placed, one.stack_layout)
        for one in arrangement.inputs
        if isinstance(one, EqualMemory)
    }
    numbers = {n: number for number, n in enumerate(arrangement.results) if isinstance(n, int)}
    return RunAs(
        arrangement.plan,
        found,
        [
            stacks[n.inputs] if isinstance(n, EqualMemory) else sources[n]
            for n in arrangement.inputs
        ],
        [
            *[(numbers[n], place) for n, place in targets if n in numbers],
            *[
                (number, stacks[one.inputs])
                for number, one in enumerate(arrangement.results)
                if isinstance(one, EqualMemory)
            ],
        ],
        [dataclasses.replace(mark, number=numbers[mark.number]) for mark in made],
    )


def checked_repeat(repeat: Any) -> Repeat:
    """What `repeat` says.

    Raises:
        ValueError: it is neither None, "auto" nor "always".
    """
    if repeat is None or (isinstance(repeat, str) and repeat in ("auto", "always")):
        return repeat
    raise ValueError(
        f"repeat={repeat!r} is not known; it is None, and layers are compiled as they are, "
        '"auto", and equal ones are compiled once if that makes the program no slower, or '
        '"always": xs.compile(step, repeat="auto")'
    )
