"""Benchmark: a DTensor's shards to JAX and back, beside gather, NumPy and scatter.

    python -m benchmarks.dtensor [--rounds 200]

Starts four processes, one device each, joined by gloo. In every rank `iso.to_jax(dtensor)` and
`iso.to_dtensor(array, mesh)` share the local memory and send nothing, so the time depends neither
on the bytes nor on the other ranks; the ranks are timed one after the other, as four processes
share this machine's cores. What people do today goes through the host: `dtensor.full_tensor()`,
NumPy, `jax.make_array_from_callback`; and back `process_allgather`, NumPy, `distribute_tensor` with
`src_data_rank=None`, which sends nothing, as every rank has the whole by then. There all ranks work
together. The times of the ranks are pooled.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import timing

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
SIZES = {"4 KB": 2**12, "256 KB": 2**18, "4 MB": 2**22, "64 MB": 2**26}
COLUMNS = 256  # of float32
WARMUP = 10
LIMIT = 300
"""Seconds for all ranks together."""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/dtensor.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dtensor")
    parser.add_argument("--rounds", type=int, default=200, help="timed calls of each contestant")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.report is not None:
        work(options.rounds, options.report)
        return
    results = summary(launch(options.rounds))
    console = Console()
    console.print(table(results))
    console.print(f"wrote {timing.save('dtensor', results)}")


def launch(rounds: int, *, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Start the ranks with torchrun's environment, and wait for what they measure.

    Args:
        rounds: timed calls of each contestant.
        limit: seconds, after which all ranks are ended.

    Returns:
        The report of each rank, see `work`.

    Raises:
        RuntimeError: a rank failed, or all took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{rank}.json" for rank in range(RANKS)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        started = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.dtensor"),
                    *("--rounds", str(rounds), "--report", str(report)),
                ],
                cwd=ROOT,
                env=_environment() | address | _rank(rank),
            )
            for rank, report in enumerate(reports)
        ]
        end = time.monotonic() + limit
        try:
            codes = [one.wait(max(0.1, end - time.monotonic())) for one in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks took more than {limit:.0f} s") from None
        finally:
            for one in started:
                one.kill()
                one.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with status {codes}; their errors stand above")
        return [json.loads(report.read_text()) for report in reports]


def work(rounds: int, report: Path) -> None:
    """Measure in one rank, and write the seconds of each call.

    Args:
        rounds: timed calls of each contestant.
        report: file to write: by direction, size and contestant the list of seconds, and "shared",
            whether the memory was.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import isoshard as iso

    iso.init_distributed()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
    found: dict[str, Any] = {}
    for direction, make in {"to JAX": to_jax, "to torch": to_dtensor}.items():
        calls = rounds + WARMUP + 1
        made = {size: make(count, mesh, calls) for size, count in SIZES.items()}
        ours = {size: call["isoshard"] for size, call in made.items()}
        for call in ours.values():
            call()  # the first one asks all ranks whether they agree
        times: dict[str, list[float]] = {}
        for rank in range(RANKS):
            dist.barrier()
            if rank == dist.get_rank():
                times = timing.interleave(ours, rounds=rounds, warmup=WARMUP)
        dist.barrier()
        found[direction] = {
            size: {
                "isoshard": times[size],
                **timing.interleave(
                    {"gather": call["gather"]}, rounds=max(5, rounds // 10), warmup=2
                ),
                "shared": call["shared"](),
            }
            for size, call in made.items()
        }
    report.write_text(json.dumps(found))
    dist.barrier()


def to_jax(count: int, mesh: Any, calls: int) -> dict[str, Callable[[], Any]]:
    """The calls from a row-sharded DTensor of `count` bytes to a `jax.Array`."""
    import jax

    import isoshard as iso
    from isoshard.torch_bridge.dtensor import translation

    x = _dtensor(count, mesh)
    layout = translation.layout_of(x.placements, mesh, tuple(x.shape)).sharding

    def gather() -> jax.Array:
        whole = x.full_tensor().numpy()
        made = jax.make_array_from_callback(whole.shape, layout, lambda index: whole[index])
        return made.block_until_ready()

    def shared() -> bool:
        piece = iso.to_jax(x, copy=False).addressable_data(0)
        return piece.unsafe_buffer_pointer() == x.to_local().data_ptr()

    return {"isoshard": lambda: iso.to_jax(x, copy=False), "gather": gather, "shared": shared}


def to_dtensor(count: int, mesh: Any, calls: int) -> dict[str, Callable[[], Any]]:
    """The calls from a row-sharded `jax.Array` of `count` bytes to a DTensor."""
    import jax
    import torch
    from jax.experimental import multihost_utils
    from torch.distributed.tensor import Shard, distribute_tensor

    import isoshard as iso

    array = iso.to_jax(_dtensor(count, mesh), copy=True)
    piece = array.addressable_data(0)

    def fresh() -> jax.Array:
        """Another array over the buffer: JAX remembers the shards of one it was asked before."""
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [piece])

    results = [fresh() for _ in range(calls)]

    def gather() -> torch.Tensor:
        whole = multihost_utils.process_allgather(array, tiled=True)
        return distribute_tensor(torch.tensor(whole), mesh, [Shard(0)], src_data_rank=None)

    def shared() -> bool:
        pointer = iso.to_dtensor(array, mesh, copy=False).to_local().data_ptr()
        return pointer == array.addressable_data(0).unsafe_buffer_pointer()

    def ours() -> torch.Tensor:
        return iso.to_dtensor(results.pop(), mesh, copy=False)

    return {"isoshard": ours, "gather": gather, "shared": shared}


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Pool what the ranks measured.

    Args:
        reports: of each rank, see `work`.

    Returns:
        By direction and size: times in milliseconds, with "ratio" to isoshard's median, how many
        local buffers are shared, and isoshard's median over that of the smallest size.
    """
    results: dict[str, Any] = {}
    for direction, sizes in reports[0].items():
        results[direction] = rows = {}
        for size in sizes:
            told = [report[direction][size] for report in reports]
            pooled = {
                name: [seconds for one in told for seconds in one[name]]
                for name in ("isoshard", "gather")
            }
            rows[size] = timing.summary(pooled, "isoshard")
            rows[size]["shared"] = sum(one["shared"] for one in told)
            rows[size]["ranks"] = len(told)
        smallest = next(iter(rows.values()))["isoshard"]["median_ms"]
        for row in rows.values():
            row["to_smallest"] = row["isoshard"]["median_ms"] / smallest
    return results


def table(results: dict[str, Any]) -> Table:
    """Show what `summary` found."""
    shown = Table(title=f"float32 DTensor over {RANKS} processes, per tensor")
    titles = ("", "size", "isoshard", "best", "to 4 KB", "gather", "ratio", "shared")
    for title in titles:
        shown.add_column(title, justify="left" if not title else "right")
    for direction, sizes in results.items():
        for size, row in sizes.items():
            shown.add_row(
                direction,
                size,
                f"{row['isoshard']['median_ms'] * 1e3:.0f} us",
                f"{row['isoshard']['best_ms'] * 1e3:.0f} us",
                f"{row['to_smallest']:.2f}",
                f"{row['gather']['median_ms']:.2f} ms",
                f"{row['gather']['ratio']:.0f}",
                f"{row['shared']} of {row['ranks']}",
            )
    return shown


def _dtensor(count: int, mesh: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(count // (4 * COLUMNS * RANKS), COLUMNS)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _environment() -> dict[str, str]:
    """The variables of this process, without those by which JAX was told its devices here."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _rank(rank: int) -> dict[str, str]:
    ranks = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    return {name: str(value) for name, value in ranks.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
