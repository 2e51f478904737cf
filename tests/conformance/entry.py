"""One entry of the database: every sample of every column on one tape, executed once.

A compilation costs more than recording an operator, so all samples are recorded first. If the tape
cannot be compiled, the samples are run one at a time, and the culprit is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from isoshard.core.runtime import metrics

from . import ambiguous, layout
from .cells import Cell
from .columns import COLUMNS, Column, NothingToCompare
from .compare import first_difference
from .samples import (
    DEVICE,
    ON_CPU,
    VALUES,
    choose,
    copied,
    even_sizes,
    moved,
    names_device,
    refused_by,
    tensors,
    widened,
)


@dataclasses.dataclass
class Attempt:
    """One sample of one column.

    Attributes:
        column: which.
        sample: on the CPU.
        want: what torch gives.
        random: torch gives something else for another seed.
        place: brings a CPU tensor to the `jax` device.
        got: what the `jax` device gives; recorded, then read.
        fault: what is wrong, as `(status, reason)`.
        host: computed on the CPU.
    """

    column: Column
    sample: SampleInput
    want: Any
    random: bool
    place: Callable[[torch.Tensor], torch.Tensor]
    got: Any = None
    fault: tuple[str, str] | None = None
    host: bool = False


def run(info: OpInfo, columns: Sequence[str], limit: int | None = None) -> dict[str, Cell]:
    """Try an entry.

    Args:
        info: the entry.
        columns: names of the columns to try, which it must have.
        limit: how many samples per column; None for each column's own number.

    Returns:
        A cell per column.
    """
    cells = {}
    attempts: dict[str, list[Attempt]] = {}
    for name in columns:
        found = attempts_of(info, COLUMNS[name], limit)
        if isinstance(found, str):
            cells[name] = Cell("none", reason=found)
        else:
            attempts[name] = found
    everything = [attempt for found in attempts.values() for attempt in found]
    for sharded in (False, True):
        batch = [attempt for attempt in everything if attempt.column.sharded == sharded]
        if batch:
            _try(info, batch)
    return cells | {name: _cell(found) for name, found in attempts.items()}


def attempts_of(info: OpInfo, column: Column, limit: int | None) -> list[Attempt] | str:
    """The samples of one column, with what torch gives; or why there is none."""
    limit = column.samples if limit is None else min(limit, column.samples)
    if column.refused:
        return _with_reference(info, column, refused_by(info)[:limit], to_device)
    if not column.sharded:
        options = {"reference": column.reference, "takes": column.takes}
        try:
            samples = choose(info, column.dtype, limit, requires_grad=column.gradient, **options)
        except Exception as error:  # torch's own, of a dtype that it cannot make
            return f"torch: {type(error).__name__}: {error}"
        return _with_reference(info, column, samples, to_device)
    with even_sizes():
        try:
            samples = choose(info, column.dtype, limit)
        except Exception:  # some samples hold for the usual sizes only
            samples = []
    found = _sharded(info, column, samples)
    return (
        found
        if isinstance(found, list)
        else _sharded(info, column, choose(info, column.dtype, limit))
    )


def _sharded(info: OpInfo, column: Column, samples: Sequence[SampleInput]) -> list[Attempt] | str:
    fit = [sample for sample in samples if any(layout.spec_of(t) for t in tensors(sample))]
    if not fit:
        return "no operand has an axis that divides over the devices"
    return _with_reference(info, column, fit, layout.spread)


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the `jax` device."""
    return tensor.to(DEVICE)


def _with_reference(
    info: OpInfo, column: Column, samples: Sequence[SampleInput], place: Any
) -> list[Attempt] | str:
    attempts = []
    refused = "the database has no sample"
    for sample in samples:
        try:
            want = _reference(info, column, sample, seed=0)
            again = _reference(info, column, sample, seed=1)
        except Exception as error:  # what torch refuses (in place, with out=) is no sample
            refused = f"torch: {type(error).__name__}: {summary(error)}"
            continue
        random = first_difference(want, again) is not None
        attempts.append(Attempt(column, sample, want, random, place))
    if any(attempt.random for attempt in attempts):  # two seeds may draw the same for one of them
        for attempt in attempts:
            attempt.random |= any(
                first_difference(attempt.want, _reference(info, column, attempt.sample, seed))
                for seed in range(2, 6)
            )
    return attempts or refused


def _reference(info: OpInfo, column: Column, sample: SampleInput, seed: int = 0) -> Any:
    with _seeded(seed):
        out = column.run(info, copied(sample))
    if column.refused:
        if out == ["nothing"]:
            raise NothingToCompare("torch takes it")
        return ["nothing"] if sample.name == VALUES else out
    return _settled(info, column, sample, out)


def _settled(info: OpInfo, column: Column, sample: SampleInput, out: Any) -> Any:
    if column.refused:
        return out
    if not column.several:
        return ambiguous.settled(info, sample, out, column.gradient)
    return [
        ambiguous.settled(info, sample, part, column.gradient) if tensors(part) else part
        for part in out
    ]


@contextlib.contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seed torch; some entries of the database seed it themselves, and are led to `number` too."""
    seed = torch.manual_seed
    seed(number)
    with unittest.mock.patch.object(torch, "manual_seed", lambda given: seed(given + number)):
        yield


def _try(info: OpInfo, attempts: Sequence[Attempt]) -> None:
    """Record all attempts, execute them together, and compare."""
    for attempt in attempts:
        _guarded(attempt, lambda attempt=attempt: _record(info, attempt))
    try:
        xs.sync()
    except Exception:  # which of them it was: one at a time
        for attempt in attempts:
            attempt.got = None
        for attempt in attempts:
            if attempt.fault is None:
                _guarded(attempt, lambda attempt=attempt: _alone(info, attempt))
    for attempt in attempts:
        if attempt.fault is None:
            _guarded(attempt, lambda attempt=attempt: _compare(info, attempt))
        attempt.got = None


def _guarded(attempt: Attempt, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        attempt.got = None
        attempt.fault = ("error", f"{type(error).__name__}: {summary(error)}")


def summary(error: BaseException) -> str:
    """The first lines of an error's message, short."""
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else text[:237] + ".."


def _record(info: OpInfo, attempt: Attempt) -> None:
    before = metrics.counters()["fallbacks"]
    runs = 2 if attempt.random else 1  # the same seed must give the same numbers
    got = []
    for _ in range(runs):
        torch.manual_seed(0)
        sample = moved(attempt.sample, attempt.place, arguments=info.name not in ON_CPU)
        with contextlib.nullcontext() if names_device(sample) else torch.device(DEVICE):
            out = attempt.column.run(info, sample)
        got.append(pytree.tree_map_only(torch.Tensor, _readable, out))
    attempt.got = got
    attempt.host = metrics.counters()["fallbacks"] > before


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose value one program gives: a result may be a view, which would need another."""
    if tensor.device.type != DEVICE:
        raise AssertionError(f"a result is on {tensor.device}, not on the jax device")
    return tensor.detach().clone() if tensor.layout == torch.strided else tensor


def _alone(info: OpInfo, attempt: Attempt) -> None:
    _record(info, attempt)
    xs.sync()


def _compare(info: OpInfo, attempt: Attempt) -> None:
    got = [pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.cpu(), out) for out in attempt.got]
    sample, column = attempt.sample, attempt.column
    have = [_settled(info, column, sample, out) for out in got]
    if column.refused:
        fault = _other_error(attempt.want, have[0])
    elif attempt.random or ambiguous.is_uninitialised(info):
        fault = ambiguous.only_form(attempt.want, have, ambiguous.is_uninitialised(info))
    else:
        fault = first_difference(
            attempt.want, have[0], lambda: _reference(info, column, widened(sample))
        )
    if fault:  # where errors are compared, no value is wrong
        attempt.fault = ("error" if column.refused else "wrong", fault)


def _other_error(want: list[str], have: list[str]) -> str | None:
    """What is wrong with an error; one of a class below torch's is as good."""
    return None if want[0] in have else f"{have[0]} is raised, torch raises {want[0]}"


def _cell(attempts: Sequence[Attempt]) -> Cell:
    faults = [attempt.fault for attempt in attempts if attempt.fault]
    worst = next((fault for fault in faults if fault[0] == "wrong"), faults[0] if faults else None)
    status, reason = worst or ("pass", "")
    host = any(attempt.host for attempt in attempts)
    return Cell(status, len(attempts) - len(faults), len(attempts), reason, host)
