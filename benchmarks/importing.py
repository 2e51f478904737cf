"""Benchmark: what importing isoshard adds to importing what it stands on.

    python -m benchmarks.importing [--rounds 15]

A new process, with compiled bytecode, imports what isoshard stands on, then isoshard: jax before
`isoshard`, jax and torch before `isoshard.torch_bridge`. Counted is processor time, of all threads,
which a busy machine changes little; the median of all rounds is shown.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tools.harness import tables
from tools.harness.command import Benchmark

IMPORTS = {"isoshard": "jax", "isoshard.torch_bridge": "jax, torch"}
"""Of ours -> what it stands on."""

_PROGRAM = """
import json, sys, time
times = [time.process_time()]
import {bare}
times.append(time.process_time())
before = set(sys.modules)
import {ours}
times.append(time.process_time())
print(json.dumps({{"times": times, "modules": len(set(sys.modules) - before)}}))
"""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/importing.json`."""
    benchmark = Benchmark(
        "importing", __doc__, rounds=15, quick=2, docs=("benchmarks.md", markdown)
    )
    results = measure(benchmark.parse().rounds)
    benchmark.finish(results, table(results))


def measure(rounds: int) -> dict[str, Any]:
    """Time every import, in turns.

    Args:
        rounds: processes of each that count; one more is started before them, which writes the
            bytecode.

    Returns:
        By import of ours, milliseconds of what it stands on and of itself, the ratio of both
        together to the former, and how many modules ours loads.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        settings = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "JAX_PLATFORMS": "cpu"}
        settings.pop("PYTHONDONTWRITEBYTECODE", None)
        taken = [
            {ours: in_new_process(ours, bare, settings) for ours, bare in IMPORTS.items()}
            for _ in range(rounds + 1)
        ]
    return {
        ours: {"after": bare, **_middle([record[ours] for record in taken[1:]])}
        for ours, bare in IMPORTS.items()
    }


def in_new_process(ours: str, bare: str, settings: Mapping[str, str]) -> dict[str, float]:
    """Import both in a new Python.

    Args:
        ours: a module.
        bare: what is imported before it.
        settings: the environment.

    Raises:
        CalledProcessError: an import fails; its message is on standard error.
    """
    command = [sys.executable, "-c", _PROGRAM.format(ours=ours, bare=bare)]
    done = subprocess.run(command, env=settings, check=True, stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    start, between, end = report["times"]
    bare_ms, ours_ms = 1e3 * (between - start), 1e3 * (end - between)
    ratio = (bare_ms + ours_ms) / bare_ms
    return {"bare_ms": bare_ms, "ours_ms": ours_ms, "ratio": ratio, "modules": report["modules"]}


def _middle(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def table(results: Mapping[str, Any]) -> Table:
    """Show what `measure` found."""
    columns = {
        "after": "`{after}`",
        "that takes": "{bare_ms:.0f} ms",
        "it adds": "{ours_ms:.0f} ms",
        "ratio": "{ratio:.2f}",
        "modules": "{modules:.0f}",
    }
    rows = {f"`{ours}`": row for ours, row in results.items()}
    return tables.by_name("processor time of an import", columns, rows)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
