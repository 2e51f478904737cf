"""What a case gives on the device, beside the CPU, and the table of docs/ecosystem.md."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge
from tests.ecosystem.case import Case
from tools.harness import tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ecosystem.md"
BEGIN, END = "<!-- begin: python -m tests.ecosystem -->", "<!-- end -->"


@dataclasses.dataclass(frozen=True)
class Row:
    """What a case gave.

    Attributes:
        case: which.
        compilations: programs that XLA compiled.
        fallbacks: operators that ran on the CPU.
        seconds: from its start to its end, compilations included.
        fault: what differs from CPU torch; empty for nothing.
    """

    case: Case
    compilations: int
    fallbacks: int
    seconds: float
    fault: str


def measured(case: Case) -> Row:
    """Run a case on the CPU and on the device, and compare."""
    want = case.run("cpu")
    iso.metrics.reset()
    started = time.perf_counter()
    try:
        got = [_host(one) for one in case.run("jax")]
        fault = _fault(got, [_host(one) for one in want], case.rtol)
    except Exception:
        fault = traceback.format_exc(limit=-3)
    counted = iso.metrics.counters()
    seconds = time.perf_counter() - started
    return Row(case, counted["compilations"], counted["fallbacks"], seconds, fault)


def _host(value: Any) -> torch.Tensor:
    if isinstance(value, jax.Array):
        return torch.from_numpy(np.array(value))
    return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)


def _fault(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], rtol: float) -> str:
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (one, other)]
            return f"result {number} is {kinds[0]}, not {kinds[1]}"
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"result {number} differs"
            continue
        largest = other.abs().max().item() if other.numel() else 0.0
        off = (one - other).abs().max().item() if other.numel() else 0.0
        if not off <= rtol * max(largest, 1e-3):
            return f"result {number} is {off:.2g} off, of {largest:.2g}"
    return ""


def rows(page: str) -> list[list[str]]:
    """The cells of the table on the page."""
    table = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def written(page: str, found: Sequence[Row]) -> str:
    """The page with another table."""
    titles = "library", "version", "program", "what is changed", "equal"
    titles += "compilations", "on the CPU", "seconds"
    lines = []
    for row in found:
        case = row.case
        version = importlib.metadata.version(case.library)
        cells = (
            case.library,
            version,
            case.what,
            f"`{case.line}`" if case.line else "nothing",
            "no" if row.fault else "yes",
            str(row.compilations),
            str(row.fallbacks),
            f"{row.seconds:.0f}",
        )
        lines.append(cells)
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n{tables.markdown(titles, lines)}\n{END}{tail}"
