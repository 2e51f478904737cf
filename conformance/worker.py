"""What runs in a worker process: torch and JAX with eight virtual devices, and the database."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tiers import tracing
from tiers.lowerings import Lowerings

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
        _add(trace, name, files | watched.files)
        return cells

    return run


def _add(folder: Path, entry: str, files: set[str]) -> None:
    """Note files of an entry; its columns may come from several processes."""
    with (folder / entry).open("a") as noted:
        noted.writelines(f"{name}\n" for name in sorted(files))


def traced(folder: Path) -> dict[str, set[str]]:
    """What was noted: entry -> files."""
    return {path.name: set(path.read_text().split()) for path in folder.iterdir()}
