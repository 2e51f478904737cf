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

from collections.abc import Callable
from typing import Any

from rich.table import Table

from tools.harness import calls, tables, timing
from tools.harness.command import Benchmark

RANKS = 4
SIZES = {"4 KB": 2**12, "256 KB": 2**18, "4 MB": 2**22, "64 MB": 2**26}
COLUMNS = 256  # of float32
WARMUP = 10
LIMIT = 300
"""Seconds for all ranks together."""


def main() -> None:
    """Run the benchmark and save `benchmarks/results/dtensor.json`."""
    benchmark = Benchmark("dtensor", __doc__, rounds=200, docs=("benchmarks.md", markdown))
    results = summary(launch(benchmark.parse().rounds))
    benchmark.finish(results, table(results))


def launch(rounds: int, *, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Start the ranks with torchrun's environment, and wait for what they measure.

    Args:
        rounds: timed calls of each contestant.
        limit: seconds, after which all ranks are ended.

    Returns:
        The report of each rank, see `work`.

    Raises:
        calls.Failed: a rank failed, or all took too long.
    """
    each = [{**rank, "JAX_PLATFORMS": "cpu"} for rank in calls.ranks(RANKS)]
    return calls.together("benchmarks.dtensor:work", rounds, variables=each, limit=limit)


def work(rounds: int) -> dict[str, Any]:
    """Measure in one rank.

    Args:
        rounds: timed calls of each contestant.

    Returns:
        By direction, size and contestant the seconds of each call, and "shared", whether the memory
        was.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import isoshard as iso

    iso.distributed.init_distributed()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
    results: dict[str, Any] = {}
    for direction, make in {"to JAX": to_jax, "to torch": to_dtensor}.items():
        count_of_calls = rounds + WARMUP + 1
        calls_of = {size: make(count, mesh, count_of_calls) for size, count in SIZES.items()}
        ours = {size: call["isoshard"] for size, call in calls_of.items()}
        for call in ours.values():
            call()  # the first one asks all ranks whether they agree
        times: dict[str, list[float]] = {}
        for rank in range(RANKS):
            dist.barrier()
            if rank == dist.get_rank():
                times = timing.interleave(ours, rounds=rounds, warmup=WARMUP)
        dist.barrier()
        results[direction] = {
            size: {
                "isoshard": times[size],
                **timing.interleave(
                    {"gather": call["gather"]}, rounds=max(5, rounds // 10), warmup=2
                ),
                "shared": call["shared"](),
            }
            for size, call in calls_of.items()
        }
    dist.barrier()
    return results


def to_jax(count: int, mesh: Any, calls: int) -> dict[str, Callable[[], Any]]:
    """The calls from a row-sharded DTensor of `count` bytes to a `jax.Array`."""
    import jax

    import isoshard as iso
    from isoshard.torch_bridge.placements import translation

    x = _dtensor(count, mesh)
    layout = translation.layout_of(x.placements, mesh, tuple(x.shape)).sharding

    def gather() -> jax.Array:
        gathered = x.full_tensor().numpy()
        array = jax.make_array_from_callback(gathered.shape, layout, lambda index: gathered[index])
        return array.block_until_ready()

    def shared() -> bool:
        shard = iso.to_jax(x, copy=False).addressable_data(0)
        return shard.unsafe_buffer_pointer() == x.to_local().data_ptr()

    return {"isoshard": lambda: iso.to_jax(x, copy=False), "gather": gather, "shared": shared}


def to_dtensor(count: int, mesh: Any, calls: int) -> dict[str, Callable[[], Any]]:
    """The calls from a row-sharded `jax.Array` of `count` bytes to a DTensor."""
    import jax
    import torch
    from jax.experimental import multihost_utils
    from torch.distributed.tensor import Shard, distribute_tensor

    import isoshard as iso

    array = iso.to_jax(_dtensor(count, mesh), copy=True)
    shard = array.addressable_data(0)

    def fresh() -> jax.Array:
        """Another array over the buffer: JAX remembers the shards of one it was asked before."""
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [shard])

    results = [fresh() for _ in range(calls)]

    def gather() -> torch.Tensor:
        gathered = multihost_utils.process_allgather(array, tiled=True)
        return distribute_tensor(torch.tensor(gathered), mesh, [Shard(0)], src_data_rank=None)

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
            measured = [report[direction][size] for report in reports]
            pooled = {
                name: [seconds for record in measured for seconds in record[name]]
                for name in ("isoshard", "gather")
            }
            rows[size] = timing.summary(pooled, "isoshard")
            rows[size]["shared"] = sum(record["shared"] for record in measured)
            rows[size]["ranks"] = len(measured)
        smallest = next(iter(rows.values()))["isoshard"]["median_ms"]
        for row in rows.values():
            row["to_smallest"] = row["isoshard"]["median_ms"] / smallest
    return results


def table(results: dict[str, Any]) -> Table:
    """Show what `summary` found."""
    columns = {
        "isoshard": "{isoshard[median_ms]:.3f} ms",
        "best": "{isoshard[best_ms]:.3f} ms",
        "to 4 KB": "{to_smallest:.2f}",
        "gather": "{gather[median_ms]:.2f} ms",
        "ratio": "{gather[ratio]:.0f}",
        "shared": "{shared} of {ranks}",
    }
    title = f"float32 DTensor over {RANKS} processes, per tensor"
    return tables.by_pair(title, ("", "size"), columns, results)


markdown = tables.documented(table)


def _dtensor(count: int, mesh: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(count // (4 * COLUMNS * RANKS), COLUMNS)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


if __name__ == "__main__":
    main()
