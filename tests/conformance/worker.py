"""What runs in a worker process: torch and JAX with eight virtual devices, and the database."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.tiers import tracing
from tools.tiers.lowerings import Lowerings

from .cells import Cell

DEVICES = 8


def start(
    limit: int | None = None, trace: Path | None = None
) -> Callable[[str, Sequence[str]], dict[str, Cell]]:
    """Set a process up.

    Args:
        limit: samples per column; None for each column's own number.
        trace: folder in which to note what files of ours each entry executes; None for not.

    Returns:
        A function of an entry's name and its columns, which tries them.
    """
    import isoshard as iso

    iso.simulate_devices(DEVICES)
    watched = Lowerings() if trace else None
    import numpy as np
    import torch

    from . import entry
    from .database import entries

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = entries()

    def run(name: str, columns: Sequence[str]) -> dict[str, Cell]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  (torch.testing draws from it)
        if trace is None or watched is None:
            return entry.run(known[name], columns, limit)
        watched.ran.clear()
        with tracing.executed() as files:
            cells = entry.run(known[name], columns, limit)
        _add(trace, name, files | watched.files, watched.registering(name))
        return cells

    return run


def _add(folder: Path, entry: str, files: set[str], own: set[str]) -> None:
    """Note files of an entry; its columns may come from several processes."""
    with (folder / entry).open("a") as noted:
        noted.writelines(f"ran {name}\n" for name in sorted(files))
        noted.writelines(f"own {name}\n" for name in sorted(own))


def traced(folder: Path, kind: str = "ran") -> dict[str, set[str]]:
    """What was noted.

    Args:
        folder: where.
        kind: `ran` for what executed, `own` for what registers the operator itself.

    Returns:
        Entry -> files.
    """
    found = {}
    for path in folder.iterdir():
        words = [line.split() for line in path.read_text().splitlines()]
        found[path.name] = {name for which, name in words if which == kind}
    return found
