"""The folder of compiled programs that the tests share: `python -m tiers.compiled` keeps it small.

JAX writes every program that a test compiles into `JAX_COMPILATION_CACHE_DIR`, which the Makefile
sets; nothing takes them out again, so the oldest go before a run.
"""

from __future__ import annotations

import os
from pathlib import Path

LIMIT = 2 * 1024**3
"""Bytes that may stay."""


def prune(folder: Path, limit: int = LIMIT) -> tuple[int, int]:
    """Remove the oldest files of a folder until the others take no more than `limit` bytes.

    Args:
        folder: of files; it need not be there.
        limit: bytes that may stay.

    Returns:
        How many files stay, and their bytes.
    """
    found = [(path.stat(), path) for path in folder.glob("*-cache")]
    count = total = 0
    for stat, path in sorted(found, key=lambda pair: pair[0].st_mtime, reverse=True):
        if total + stat.st_size > limit:
            path.unlink(missing_ok=True)
        else:
            count, total = count + 1, total + stat.st_size
    return count, total


def main() -> None:
    """Prune the folder that the environment names, and say what is in it."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder:
        count, total = prune(Path(folder))
        print(f"{count} compiled programs of earlier runs, {total / 2**20:.0f} MiB, in {folder}")


if __name__ == "__main__":
    main()
