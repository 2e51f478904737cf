"""What runs in a worker process: torch and JAX with eight virtual devices, and the database."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from tests.host import seed_the_cpu_alone

from .cells import Cell

DEVICES = 8


def start(limit: int | None = None) -> Callable[[str, Sequence[str]], dict[str, Cell]]:
    """Set a process up.

    Args:
        limit: samples per column; None for each column's own number.

    Returns:
        A function of an entry's name and its columns, which tries them.
    """
    import isoshard as iso

    iso.simulate_devices(DEVICES)
    import numpy as np
    import torch

    from . import entry
    from .database import entries

    torch.set_num_threads(1)
    seed_the_cpu_alone()
    warnings.simplefilter("ignore")
    known = entries()

    def run(name: str, columns: Sequence[str]) -> dict[str, Cell]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  (torch.testing draws from it)
        return entry.run(known[name], columns, limit)

    return run
