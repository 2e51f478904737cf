"""Metrics: what ran, what was compiled and why, and what was moved or copied.

Nothing expensive happens without a count here. Read the counters by name, or print `report()`.

>>> reset()
>>> count("copies")
>>> count("copied_bytes", 4096)
>>> record_compilation("step", "first call", "train.py:31", 0.25)
>>> counters()["copied_bytes"]
4096
>>> [c.cause for c in compilations()]
['first call']
>>> record_transfer("device_to_host", 4, "train.py:33")
>>> print(report())
compilations                           1  programs compiled
transfers.device_to_host               1  device buffers read by the host
transfers.device_to_host_bytes       4 B  bytes read by the host
copies                                 1  buffers copied between frameworks
copied_bytes                     4.0 KiB  bytes copied between frameworks
<BLANKLINE>
compiled: 1 program in 0.25 s
  step  train.py:31  0.25 s  first call
<BLANKLINE>
moved between host and devices:
  train.py:33  device_to_host  1 buffer  4 B
>>> reset()

Counts are kept for the whole process, from import or the last `reset()`.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from pathlib import Path
from types import FrameType

from isoshard.core.installation import ANNEXES

from . import samples
from .report_lines import amount, compiled_lines, transfer_lines
from .shown_text import ShownText

DESCRIPTIONS = {
    "executions": "compiled programs run",
    "syncs": "times that sync() was called",
    "compilations": "programs compiled",
    "cache_hits": "of these, read from the compilation cache",
    "evictions": "compiled programs dropped from memory to make room",
    "captures": "times that a compiled step was captured",
    "calls_without_replay": "calls of compiled steps that only Python could repeat",
    "repeat.stacks": "times that memory of equal layers was stacked for a compiled step",
    "repeat.stacked_bytes": "bytes of memory that went into such stacks",
    "repeat.slices": "slices of stacks that were looked at outside of their step",
    "repeat.sliced_bytes": "bytes of those",
    "plans.found": "plans chosen automatically for steps",
    "plans.laid_out": "tensors sharded by them",
    "plans.laid_out_bytes": "bytes of those",
    "peak_bytes": "largest program, per device: inputs, results and temporaries",
    "transfers.host_to_device": "host buffers sent to devices",
    "transfers.host_to_device_bytes": "bytes sent to devices",
    "transfers.device_to_host": "device buffers read by the host",
    "transfers.device_to_host_bytes": "bytes read by the host",
    "fallbacks": "operations run outside the compiled program",
    "copies": "buffers copied between frameworks",
    "copied_bytes": "bytes copied between frameworks",
    "narrowed": "arrays of 64-bit types stored in 32 bits, as jax_enable_x64 is off",
    "narrowed_bytes": "bytes of those, in 32 bits",
    "gathers": "sharded arrays gathered in full",
    "file_reads": "runs of bytes read from files of weights",
    "file_bytes_read": "bytes read from files of weights",
    "uneven_marks": "marks with a split that does not divide, so buffers are not split",
    "donated_bytes": "bytes of inputs reused for outputs",
    "reads_of_shards": "arrays on several devices that scripts of torch_xla read",
    "marks": "tensors marked by scripts of torch_xla",
    "op_shardings": "OpSharding strings built for meshes, each once",
    "store.requests": "requests of this process to JAX's coordination service, its notes to others",
    "store.bytes": "bytes of their keys and values",
    "data.batches": "batches that loaders gave",
    "data.waits": "of these, not ready when requested",
    "data.padded_rows": "rows repeated to fill batches",
    "data.padded_positions": "positions added to sequences",
    "data.dropped_rows": "rows left out, in last batches that do not divide",
}

# Code of these packages is never the user's own; the demo in isoshard.cli is.
_INTERNAL = ("isoshard.", "torch.", "jax.", "jaxlib.", "flax.", "optax.", "numpy.")
_INTERNAL += ("contextlib.", "functools.", "importlib.", "logging.", "warnings.")
_OWN = ("isoshard.cli.", *(f"isoshard.{annex}.cli." for annex in ANNEXES))

_counts: collections.defaultdict[str, int] = collections.defaultdict(int)
_compilations: collections.deque[Compilation] = collections.deque(maxlen=10_000)
_transfers: dict[tuple[str, str], list[int]] = {}
"""Of each direction and line, how many buffers, and their bytes."""
_repeats: dict[str, str] = {}
"""Of each step compiled with `repeat`, by its line, what became of its layers."""
_plans: dict[str, str] = {}
"""The outcomes of automatic plans, by the step's line."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program compiled by XLA.

    Attributes:
        what: the program, e.g. the name of a function or "tape of 92 operations".
        cause: why a compiled program could not be reused.
        where: the line of user code that needed it, as `file.py:123`.
        seconds: wall time of the compilation.

    Example:
        >>> Compilation("step", "first call", "train.py:31", 0.25).cause
        'first call'
    """

    what: str
    cause: str
    where: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What one line of user code moved between the host and the devices.

    Attributes:
        direction: "host_to_device" or "device_to_host".
        where: the line, as `file.py:123`.
        buffers: how many arrays.
        size: their bytes together.

    Example:
        >>> Transfer("device_to_host", "train.py:33", buffers=2, size=8).size
        8
    """

    direction: str
    where: str
    buffers: int
    size: int


def count(name: str, amount: int = 1) -> None:
    """Add to a counter.

    Args:
        name: the counter; one of `DESCRIPTIONS`, or any new name.
        amount: how much to add; bytes where the name ends in `_bytes`.

    Example:
        >>> count("my.batches", 3)
        >>> counters()["my.batches"]
        3
        >>> reset()
    """
    _counts[name] += amount  # no call between load and store, so the GIL keeps it whole


def record_compilation(what: str, cause: str, where: str, seconds: float) -> None:
    """Note one compilation and add it to the counter "compilations".

    Args:
        what: the program that was compiled.
        cause: why a compiled program could not be reused.
        where: the line of user code that needed it, as `user_location()` gives it.
        seconds: wall time of the compilation.

    Example:
        >>> reset()
        >>> record_compilation("step", "new shape", user_location(), 0.25)
        >>> counters()["compilations"], compilations()[0].cause
        (1, 'new shape')
        >>> reset()
    """
    _compilations.append(Compilation(what, cause, where, seconds))
    count("compilations")
    samples.observe("compile_seconds", seconds)


def record_transfer(direction: str, size: int, where: str, seconds: float | None = None) -> None:
    """Note one array moved between the host and the devices.

    Args:
        direction: "host_to_device" or "device_to_host".
        size: bytes.
        where: the line of user code, as `user_location()` gives it.
        seconds: how long the call that moved it took, if that was measured.

    Example:
        >>> reset()
        >>> record_transfer("device_to_host", 4, user_location())
        >>> counters()["transfers.device_to_host_bytes"]
        4
        >>> reset()
    """
    count(f"transfers.{direction}")
    count(f"transfers.{direction}_bytes", size)
    totals = _transfers.setdefault((direction, where), [0, 0])
    totals[0] += 1
    totals[1] += size
    samples.observe(f"{direction}_bytes", size)
    if seconds is not None:
        samples.observe(f"{direction}_seconds", seconds)


def record_repeat(where: str, outcome: str) -> None:
    """Note what became of the equal layers of a step that is compiled with `repeat`.

    Args:
        where: the step's line.
        outcome: how many layers became how many loops; or why none did.

    Example:
        >>> reset()
        >>> record_repeat("train.py:12", "46 layers as 3 loops")
        >>> print(report())
        repeat: 46 layers as 3 loops  (train.py:12)
        >>> reset()
    """
    _repeats[where] = outcome


def record_plan(where: str, outcome: str | None) -> None:
    """Record the outcome of a step's automatic plan.

    Args:
        where: the step's line.
        outcome: the mesh, and how much was sharded; or why there is no plan. None removes the
            record.

    Example:
        >>> reset()
        >>> record_plan("train.py:12", "mesh (data=8), 12 tensors sharded")
        >>> print(report())
        plan: mesh (data=8), 12 tensors sharded  (train.py:12)
        >>> reset()
    """
    _plans.pop(where, None)
    if outcome is not None:
        _plans[where] = outcome


def record_peak(size: int) -> None:
    """Note what a program needs on each device; the largest is the counter "peak_bytes".

    Args:
        size: bytes of its inputs, results and temporaries together.

    Example:
        >>> record_peak(4096)
        >>> record_peak(512)
        >>> counters()["peak_bytes"] >= 4096
        True
        >>> reset()
    """
    _counts["peak_bytes"] = max(_counts["peak_bytes"], size)


def counters() -> dict[str, int]:
    """Read every counter.

    Returns:
        A copy: each name in `DESCRIPTIONS` (0 where nothing was counted), then other names.

    Example:
        >>> reset()
        >>> counters()["gathers"]
        0
    """
    return dict.fromkeys(DESCRIPTIONS, 0) | dict(_counts)


def compilations() -> list[Compilation]:
    """List the compilations since the last reset.

    Returns:
        One `Compilation` each, oldest first; the last 10,000 if there were more.

    Example:
        >>> reset()
        >>> record_compilation("step", "first call", "train.py:31", 0.25)
        >>> compilations()
        [Compilation(what='step', cause='first call', where='train.py:31', seconds=0.25)]
        >>> reset()
    """
    return list(_compilations)


def transfers() -> list[Transfer]:
    """List what was moved since the last reset.

    Returns:
        One `Transfer` per line and direction, largest first.

    Example:
        >>> reset()
        >>> for size in (4, 8):
        ...     record_transfer("host_to_device", size, "train.py:33")
        >>> transfers()
        [Transfer(direction='host_to_device', where='train.py:33', buffers=2, size=12)]
        >>> reset()
    """
    moved = [Transfer(*key, *totals) for key, totals in _transfers.copy().items()]
    return sorted(moved, key=lambda transfer: -transfer.size)


def reset_counters() -> None:
    """Set every counter to zero; compilations, transfers and samples stay."""
    _counts.clear()


def reset() -> None:
    """Set every counter to zero and forget compilations, transfers and samples.

    Example:
        >>> count("gathers")
        >>> reset()
        >>> counters()["gathers"], compilations(), transfers()
        (0, [], [])
    """
    reset_counters()
    _compilations.clear()
    _transfers.clear()
    _repeats.clear()
    _plans.clear()
    samples.clear()


def report() -> ShownText:
    """Say in a few lines what happened since the last reset.

    Returns:
        The counters that are not zero with their meaning; one line per compilation: what was
        compiled, the line of user code that needed it, the seconds it took and its cause; one line
        per step compiled with `repeat` or sharded automatically; and the lines of user code that
        moved most bytes between host and devices. An interpreter or a notebook shows its lines.

    Example:
        >>> reset()
        >>> count("gathers", 2)
        >>> report()
        gathers                                2  sharded arrays gathered in full
        >>> reset()
    """
    rows = [(name, n) for name, n in counters().items() if n]
    lines = [
        f"{name:<30}{amount(name, n):>10}  {DESCRIPTIONS.get(name, '')}".rstrip()
        for name, n in rows
    ]
    done = compilations()
    if done:
        lines += ["", *compiled_lines(done)]
    if _repeats or _plans:
        lines += [""] * bool(lines)
        lines += [f"repeat: {outcome}  ({where})" for where, outcome in _repeats.copy().items()]
        lines += [f"plan: {outcome}  ({where})" for where, outcome in _plans.copy().items()]
    moved = transfers()
    if moved:
        lines += ["", "moved between host and devices:", *transfer_lines(moved)]
    return ShownText("\n".join(lines) or "nothing was counted")


def user_location() -> str:
    """Find the line of user code that is running.

    Returns:
        `file.py:123` of the innermost call outside isoshard, torch, jax, flax, optax and numpy;
        "unknown" where there is none.

    Example:
        >>> user_location().partition(":")[0]             # here doctest is the user
        'doctest.py'
    """
    frame = user_frame()
    return "unknown" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_calling(package: str) -> bool:
    """Whether code of a package is running, at any depth; for messages.

    Example:
        >>> is_calling("doctest"), is_calling("torch.optim")
        (True, False)
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__", "") + ".").startswith(package + "."):
            return True
        frame = frame.f_back
    return False


def user_frame() -> FrameType | None:
    """Find the innermost call outside isoshard, torch, jax, flax, optax and numpy, if any."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "") + "."
        if not module.startswith(_INTERNAL) or module.startswith(_OWN):
            return frame
        frame = frame.f_back
    return None
