"""One entry of torch's operator database on the `jax` device, compared with torch on the CPU.

Samples and comparison are those of `tests.conformance`, which also handles results that are random,
uninitialised or not unique. All columns of an entry are one program: forward and backward in
float32, bfloat16 and float64, and forward in int64, each if the entry has the dtype.

Tolerances, relative, and absolute in units of the median element if that exceeds 1:

- int64: none; integers are exact.
- float64: 1e-7 and 1e-9. A single operation is within an ulp or two (1e-16) on every device, but
  matrix decompositions multiply that by the condition number of the samples, up to 1e8.
- float32: 1e-4 and 2e-5. An ulp is 6e-8; the order of sums differs, and a GPU's transcendental
  functions are less accurate than a CPU's. Matrix products run in full precision: TF32, JAX's
  default on a GPU, has 10 bits and an error of 1e-3 by design.
- bfloat16: 2e-2 and 1e-2. An ulp is 4e-3, and an operator may round several times.

A value outside of these passes if its error against the result in the next wider dtype is at most
eight times that of torch on the CPU, as in the conformance table.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from tests.conformance import compare, entry
from tests.conformance.columns import COLUMNS, Column, backward
from tests.conformance.database import entries
from tests.conformance.expected import EXPECTED

TOLERANCES = {
    torch.bfloat16: (2e-2, 1e-2),
    torch.float32: (1e-4, 2e-5),
    torch.float64: (1e-7, 1e-9),
}
OTHER_DATABASES = ("hop.", "custom.", "module.", "optim.")
"""Prefixes of the entries that are not of torch's database of operators."""


_TIES = "which of equal elements comes first is not defined, and bfloat16 has many"
_POSITIONS = "isoshard computes positions of resized images in float32: errors of 1e-7 to 4e-7"
SKIPPED = {
    ("msort", "bfloat16, backward"): _TIES,
    ("sort", "bfloat16, backward"): _TIES,
    ("matrix_exp", "bfloat16, backward"): "torch on the CPU returns NaN",
    ("_upsample_bilinear2d_aa", "float64"): _POSITIONS,
    ("nn.functional.interpolate.bicubic", "float64, backward"): _POSITIONS,
}
"""(entry, column) -> why it is not compared. Found by comparing 300 entries on the CPU."""


def _backward(dtype: torch.dtype) -> Column:
    def differentiable(info: OpInfo) -> bool:
        return info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")

    return Column(f"backward, {dtype}", dtype, backward, differentiable, gradient=True)


CHECKED = {
    "float32": COLUMNS["forward"],
    "float32, backward": _backward(torch.float32),
    "bfloat16": COLUMNS["bfloat16"],
    "bfloat16, backward": _backward(torch.bfloat16),
    "float64": COLUMNS["float64"],
    "float64, backward": _backward(torch.float64),
    "int64": COLUMNS["int64"],
}
"""The columns, by the names in the results."""


def selected(count: int) -> list[str]:
    """Names of entries, spaced evenly over torch's database of operators, in random order.

    The order is the same in every call. Because it is random, a run that reaches its time limit has
    compared entries from all of the database. Entries that the conformance table expects to fail,
    of sparse and complex32 tensors, are not selected.

    Args:
        count: number of entries.

    Raises:
        ValueError: the database has fewer.

    Example:
        >>> len(set(selected(300))), selected(300) == selected(300)
        (300, True)
    """
    expected = {name for name, column in EXPECTED if column == "forward"}
    names = [
        name for name in entries() if not name.startswith(OTHER_DATABASES) and name not in expected
    ]
    if not 0 < count <= len(names):
        raise ValueError(f"torch's database has {len(names)} entries to select from, not {count}")
    names = [names[index * len(names) // count] for index in range(count)]
    random.Random(0).shuffle(names)
    return names


def start(count: int, samples: int) -> Callable[[int], tuple[str, dict[str, dict[str, Any]]]]:
    """Set up a process.

    Args:
        count: number of selected entries.
        samples: at most so many samples per column.

    Returns:
        A function that compares the selected entry of an index: its name, and what `compared`
        returns.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    compare._TOLERANCE.update(TOLERANCES)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names, database = selected(count), entries()

    def compare_entry(index: int) -> tuple[str, dict[str, dict[str, Any]]]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  (torch.testing draws from it)
        return names[index], compared(database[names[index]], samples)

    return compare_entry


def compared(info: OpInfo, samples: int) -> dict[str, dict[str, Any]]:
    """Compare all columns of an entry.

    Args:
        info: the entry.
        samples: at most so many samples per column.

    Returns:
        For each column of the entry: the number of "samples", the "reason" of the first failure (""
        if all pass), and the largest relative "error" of all samples.
    """
    attempts: dict[str, list[entry.Attempt]] = {}
    for name, column in CHECKED.items():
        skipped = (info.full_name, name) in SKIPPED
        if column.dtype in info.dtypes and column.applies(info) and not skipped:
            of_column = entry.attempts_of(info, column, samples)
            if not isinstance(of_column, str):  # a string says why there is no sample
                attempts[name] = of_column
    _record(info, [attempt for of_column in attempts.values() for attempt in of_column])
    return {name: _compared(info, of_column) for name, of_column in attempts.items()}


def _record(info: OpInfo, attempts: Sequence[entry.Attempt]) -> None:
    """Record all attempts and run them as one program, or one by one if that fails."""
    for attempt in attempts:
        entry._guarded(attempt, lambda attempt=attempt: entry._record(info, attempt))
    try:
        xs.sync()
    except Exception:  # it does not tell which attempt failed
        for attempt in attempts:
            attempt.got = None
        for attempt in attempts:
            if attempt.fault is None:
                entry._guarded(attempt, lambda attempt=attempt: entry._alone(info, attempt))


def _compared(info: OpInfo, attempts: Sequence[entry.Attempt]) -> dict[str, Any]:
    errors = [0.0]
    for attempt in attempts:
        if attempt.fault is None:
            entry._guarded(attempt, lambda attempt=attempt: entry._compare(info, attempt))
            entry._guarded(attempt, lambda attempt=attempt: errors.append(_error(info, attempt)))
        attempt.got = None
    reasons = [f"{attempt.fault[0]}: {attempt.fault[1]}" for attempt in attempts if attempt.fault]
    reason = reasons[0] if reasons else ""
    return {"samples": len(attempts), "reason": reason, "error": max(errors)}


def _error(info: OpInfo, attempt: entry.Attempt) -> float:
    """The largest error of an attempt; 0 if its result is random or could not be read."""
    if attempt.got is None or attempt.random:
        return 0.0
    result = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.cpu(), attempt.got[0])
    result = entry._settled(info, attempt.column, attempt.sample, result)
    return largest_error(attempt.want, result)


def largest_error(expected: Any, result: Any) -> float:
    """The largest error of nested tensors, relative to the largest finite element of each, or to 1.

    Args:
        expected: from torch on the CPU.
        result: from the device, on the CPU.

    Example:
        >>> largest_error([torch.tensor([1.0, -4.0])], [torch.tensor([1.0, -4.5])])
        0.125
    """
    errors = [0.0]
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(result), strict=False)
    for want, got in pairs:
        tensors = isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
        if not tensors or want.shape != got.shape:
            continue  # the comparison reports it
        want, got = (compare.plain(tensor).to(torch.complex128) for tensor in (want, got))
        finite = want.isfinite() & got.isfinite()
        if finite.any():
            scale = max(want[finite].abs().max().item(), 1.0)
            errors.append((want[finite] - got[finite]).abs().max().item() / scale)
    return max(errors)
