"""The borders between the iterations of a periodic run.

A run of equal keys can be divided at any of `period` positions. The best division carries little
from one iteration to the next, and fits the iterations of earlier loops: the backward of a layer
reads what the forward of that layer saved, so both should begin and end at the same layer. Where
the backward recomputes a layer, an optimization barrier reads all parameters of the layer: these
belong into one iteration of the forward.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.periodic_runs import PeriodicRun


def first_border(
    flow: EquationFlow, run: PeriodicRun, iterations: Mapping[int, tuple[int, int]]
) -> int:
    """How many equations of a run come before its first complete iteration.

    Args:
        flow: of the program.
        run: the run.
        iterations: loop and iteration of values that earlier loops read or produced.
    """
    strangers = _strangers(flow, run, iterations)
    separated = _separated(flow, run)
    crossing = _crossing(flow, run)

    def cost(border: int) -> tuple[int, int, int, int, int]:
        count = (run.length - border) // run.period
        return strangers[border], separated[border], -count, crossing[border], border

    return min(range(run.period), key=cost)


def _strangers(
    flow: EquationFlow, run: PeriodicRun, iterations: Mapping[int, tuple[int, int]]
) -> list[int]:
    """For each border, how many reads of an iteration are not of the most frequent iteration."""
    middle = run.start + (run.length // run.period - 1) // 2 * run.period
    reads: list[list[tuple[int, int]]] = []
    for time in range(middle, min(middle + 2 * run.period, run.start + run.length)):
        operands = flow.operands[time]
        reads.append([iterations[operand] for operand in operands if operand in iterations])
    reads += [[]] * (2 * run.period - len(reads))
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for labels in reads[: run.period]:
        counts.update(labels)
    strangers = []
    for index in range(run.period):
        of_loops: dict[int, int] = {}
        for (loop, _), count in counts.items():
            of_loops[loop] = max(of_loops.get(loop, 0), count)
        strangers.append(counts.total() - sum(of_loops.values()))
        counts.subtract(reads[index])
        counts.update(reads[index + run.period])
    return strangers


def _crossing(flow: EquationFlow, run: PeriodicRun) -> list[int]:
    """For each border, how many values cross it in the middle of the run."""
    stop = run.start + run.length
    changes = np.zeros(run.length + 2, dtype=np.int64)
    for time in range(run.start, stop):
        for value in flow.outputs[time]:
            near = [
                reader
                for reader in flow.readers[value]
                if reader < stop and reader - time < 2 * run.period
            ]
            if near:
                changes[time - run.start + 1] += 1
                changes[near[-1] - run.start + 1] -= 1
    over = np.cumsum(changes)
    middle = max(1, (run.length // run.period - 1) // 2) * run.period
    return [int(over[min(middle + index, run.length)]) for index in range(run.period)]


def _separated(flow: EquationFlow, run: PeriodicRun) -> list[int]:
    """For each border, how often it separates inputs that a later equation reads jointly."""
    stop = run.start + run.length
    separated = [0] * run.period
    for later, inputs in flow.joint_reads:
        if later < stop:
            continue
        firsts = [
            next((time for time in flow.readers[input_] if run.start <= time < stop), -1)
            for input_ in inputs
        ]
        reads = [time for time in firsts if time >= 0]
        if len(reads) > 1 and max(reads) - min(reads) < run.period:
            for time in range(min(reads) + 1, max(reads) + 1):
                separated[(time - run.start) % run.period] += 1
    return separated
