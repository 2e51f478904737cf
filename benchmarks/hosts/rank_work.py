"""What one rank measures of a run's start, of the notes between ranks, and of a checkpoint.

Nothing is imported here that takes time: the imports are the first phase. Before each later phase
the ranks wait for each other, outside of its time.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 4  # of each array in each rank
COLUMNS = 1024  # of float32
ARRAYS = 8
_STORAGE = (
    "names exists is_folder size make_folder writing reading rename remove remove_folder "
    "sync_folder"
)


class Phases:
    """Phases one after the other, each with what it cost this process.

    Attributes:
        results: by phase: "seconds", of the processor "cpu" (all threads), "requests" and "bytes"
            to the coordination service, and "storage" operations.
    """

    def __init__(self) -> None:
        """No phase has run."""
        self.results: dict[str, dict[str, float]] = {}
        self.operations = 0

    def run(self, name: str, work: Callable[[], Any], times: int = 1) -> Any:
        """Run a phase.

        Args:
            name: of the phase.
            work: what it is.
            times: how often; seconds are the median, all else is divided.

        Returns:
            What `work` returned last.
        """
        before, taken, result = self._now(), [], None
        for _ in range(times):
            start = time.perf_counter()
            result = work()
            taken.append(time.perf_counter() - start)
        spent = {key: (value - before[key]) / times for key, value in self._now().items()}
        self.results[name] = {"seconds": statistics.median(taken), **spent}
        return result

    def count_storage(self) -> None:
        """From here on, count what is asked of the file system of checkpoints."""
        from isoshard.core.checkpoint.store import LocalStore

        for name in _STORAGE.split():
            setattr(LocalStore, name, self._counting(getattr(LocalStore, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.operations += 1
            return method(*args)

        return counted

    def _now(self) -> dict[str, float]:
        import sys

        metrics = sys.modules.get("isoshard.core.runtime.metrics")
        counters = metrics.counters() if metrics else {}
        return {
            "cpu": time.process_time(),
            "requests": counters.get("store.requests", 0),
            "bytes": counters.get("store.bytes", 0),
            "storage": self.operations,
        }


def measure(folder: str, repeats: int, patience: float | None = None) -> dict[str, Any]:
    """Measure in one rank; all do so at the same time.

    Args:
        folder: empty, for a checkpoint.
        repeats: comparisons, exchanges and requests that are timed.
        patience: seconds after which a rank that waits says where, as `coordination.PATIENCE`; on a
            busy machine longer, where requests are counted.

    Returns:
        "phases", see `Phases`, and of the process at its end: "rss" and "peak" in bytes, open
        "files" (connections too) and "threads"; of the checkpoint, bytes of its "manifest", and in
        rank 0 "saved", its files.
    """
    phases = Phases()
    phases.run("imports", _imports)
    import isoshard as iso

    here = phases.run(
        "rendezvous", lambda: iso.distributed.init_distributed(timeout=400, heartbeat=400)
    )
    import numpy as np
    import torch.distributed as dist

    from isoshard.core.processes import agreement, coordination

    coordination.PATIENCE = coordination.PATIENCE if patience is None else patience
    phases.count_storage()

    def together(name: str, work: Callable[[], Any], times: int = 1) -> Any:
        dist.barrier()
        return phases.run(name, work, times)

    rows = ROWS * here.size
    values = np.arange(rows * COLUMNS, dtype=np.float32).reshape(rows, COLUMNS)
    mesh = iso.make_mesh((here.size,), ("x",))
    dtensor = _dtensor(here.size)
    spec = iso.P("x")
    together("first exchange", lambda: iso.to_jax(dtensor))
    together("steady exchange", lambda: iso.to_jax(dtensor), repeats)
    array = together("first shard", lambda: iso.shard(values, mesh, spec))
    together("steady shard", lambda: iso.shard(values, mesh, spec), repeats)
    together("first program", lambda: float(_sum(array)))
    lines = [f"w{number}: (4096, 4096) float32 by P('x')" for number in range(300)]
    together("comparison", lambda: agreement.assert_equal("layouts", lines), repeats)
    together("request", lambda: coordination.increment(f"bench/{here.rank}"), 10 * repeats)
    tree = {f"w{number}": iso.shard(values + number, mesh, spec) for number in range(ARRAYS)}
    path = Path(folder) / "run"
    together("save", lambda: iso.save(path, tree, step=1))
    together("restore", lambda: iso.restore(path, tree))
    dist.barrier()
    saved = sum(1 for file in path.rglob("*") if file.is_file()) if here.rank == 0 else 0
    manifest = (path / "1" / ".manifest").stat().st_size
    return {"phases": phases.results, "saved": saved, "manifest": manifest, **_process()}


def shard_alone(rounds: int) -> dict[str, list[float]]:
    """Seconds of `iso.shard` in a process alone, with the check of what ranks give and without.

    Args:
        rounds: calls of each.
    """
    import numpy as np

    import isoshard as iso
    from tools.harness import timing

    iso.simulate_devices(8)
    mesh = iso.make_mesh((8,), ("x",))
    values = np.ones((64, 1024), np.float32)
    calls = {
        check: (lambda check=check: iso.shard(values, mesh, iso.P("x"), check=check))
        for check in ("values", "off")
    }
    return timing.interleave(calls, rounds=rounds, warmup=10)


def _imports() -> None:
    importlib.import_module("isoshard.torch_bridge")  # and so jax and torch


def _dtensor(size: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    return DTensor.from_local(torch.ones(ROWS, COLUMNS), mesh, [Shard(0)], run_check=False)


def _sum(array: Any) -> Any:
    import jax

    return jax.jit(lambda x: x.sum())(array)


def _process() -> dict[str, int]:
    from tools.harness.timing import resident

    return {
        "rss": resident("VmRSS"),
        "peak": resident("VmHWM"),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 (numbers, not paths)
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
    }
