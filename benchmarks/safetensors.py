"""Benchmark: a safetensors folder straight to shards, against raw reads of the same bytes.

    python -m benchmarks.safetensors            # 2 GB, written to results/safetensors.json
    python -m benchmarks.safetensors --quick    # 128 MB, one round, nothing written

A random bfloat16 model, in files of 500 MB with an index, is loaded on 8 virtual devices: half of
the weights split by rows, half by columns. Every contestant has a process of its own, in turns:

- raw reads: the same threads read the files' bytes, chunk by chunk, each into new memory;
- raw, one buffer: likewise into one chunk of memory per thread, over and over: no memory is made,
  which every loader must do;
- load_safetensors: ours;
- library: `safetensors` reads each device's slice, which then becomes its shard.

Memory is the highest resident size while loading, less the one before. "cold" has the files leave
the page cache first, "warm" has them in it: then the memory is the bottleneck, not the disk. NumPy
asks for no huge pages here: on a machine in use the system now and then moves memory about for
seconds to make one, for whoever comes next.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import isoshard as iso
from isoshard.core.weights.loading import CHUNK
from tools.harness import calls, tables, timing
from tools.harness.command import Benchmark

DEVICES, THREADS, WIDTH, ROUNDS = 8, 4, 2048, 5
LAYER = 4 * WIDTH * WIDTH * 2  # bytes of one layer in bfloat16
SIZE = 2 << 30
LEAST_RATIO, MOST_MEMORY = 0.8, 1.3
PLAN = iso.Plan({"*.rows.weight": ("x",), "*.columns.weight": (None, "x")})


def write_model(folder: Path, size: int) -> int:
    """Write random weights of about `size` bytes, and say how many they are."""
    rng = np.random.default_rng(0)
    layers = max(size // LAYER, 1)

    def weight() -> Any:
        bits = rng.integers(0, 1 << 15, (2 * WIDTH, WIDTH), dtype=np.uint16)
        return bits.view(jnp.bfloat16)

    weights = {
        f"layers.{i}.{kind}.weight": weight() for i in range(layers) for kind in ("rows", "columns")
    }
    iso.save_safetensors(folder, weights, max_shard_size=min(500_000_000, size // 4))
    return sum(array.nbytes for array in weights.values())


def load_ours(folder: Path) -> Any:
    """The contestant."""
    return iso.load_safetensors(folder, _mesh(), PLAN, threads=THREADS)


def load_by_library(folder: Path) -> Any:
    """Slices by the format's own library, one after the other."""
    from safetensors import safe_open

    mesh = _mesh()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(folder / name, "np") for name in dict.fromkeys(index.values())}
    loaded = {}
    for name, file in index.items():
        part = files[file].get_slice(name)
        shape = tuple(part.get_shape())
        sharding = jax.sharding.NamedSharding(mesh, PLAN.spec_for(name, shape, mesh))
        loaded[name] = jax.make_array_from_callback(
            shape, sharding, lambda index, part=part: part[index]
        )
    return jax.block_until_ready(loaded)


def read_raw(folder: Path) -> Any:
    """Every byte into memory of its own, a piece for each chunk."""
    kept: dict[tuple[Path, int], np.ndarray] = {}

    def read(descriptor: int, path: Path, at: int) -> None:
        memory = kept[path, at] = np.empty(min(CHUNK, path.stat().st_size - at), np.uint8)
        done = 0
        while done < memory.nbytes:
            done += os.preadv(descriptor, [memory[done:].data], at + done)

    _in_chunks(folder, read)
    return kept


def read_over(folder: Path) -> Any:
    """Every byte into the same chunk of memory."""
    scratch = [np.empty(CHUNK, np.uint8) for _ in range(THREADS)]

    def read(descriptor: int, _: Path, at: int) -> None:
        buffer = scratch.pop()
        os.preadv(descriptor, [buffer.data], at)
        scratch.append(buffer)

    _in_chunks(folder, read)


def _in_chunks(folder: Path, read: Callable[[int, Path, int], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        done = []
        for path in _files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            for at in range(0, path.stat().st_size, CHUNK):
                done.append(pool.submit(read, descriptor, path, at))
        for future in done:
            future.result()


CONTESTANTS: dict[str, Callable[[Path], Any]] = {
    "raw reads": read_raw,
    "raw, one buffer": read_over,
    "load_safetensors": load_ours,
    "library": load_by_library,
}


def load_once(name: str, where: str, cold: bool) -> dict[str, float]:
    """Run a contestant in this process, on the model in a folder."""
    folder = Path(where)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.block_until_ready(iso.shard(np.ones((8, 8), np.float32), _mesh(), ("x",)))
    import safetensors  # noqa: F401  (before memory is measured)

    if cold:
        for path in _files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = timing.resident("VmRSS")
    kept: list[Any] = []
    seconds = timing.seconds(lambda: CONTESTANTS[name](folder), kept.append)
    return {"seconds": seconds, "peak": timing.resident("VmHWM") - before}


def measure(folder: Path, size: int, rounds: int, cold: bool) -> dict[str, Any]:
    """All contestants in turns, each in a process of its own."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(names).tolist():
            results[name].append(
                calls.call(
                    "benchmarks.safetensors:load_once",
                    *(name, str(folder), cold),
                    variables={"NUMPY_MADVISE_HUGEPAGE": "0"},
                    limit=300,
                )
            )
    seconds = {
        name: statistics.median(run["seconds"] for run in runs) for name, runs in results.items()
    }
    peaks = {name: max(run["peak"] for run in runs) for name, runs in results.items()}
    in_flight = THREADS * CHUNK
    return {
        "GB/s": {name: size / taken / 1e9 for name, taken in seconds.items()},
        "peak_MB": {name: peak / 1e6 for name, peak in peaks.items()},
        "seconds": {name: [run["seconds"] for run in runs] for name, runs in results.items()},
        "ratio_to_raw": seconds["raw reads"] / seconds["load_safetensors"],
        "ratio_by_round": timing.paired(
            *([run["seconds"] for run in results[who]] for who in ("raw reads", "load_safetensors"))
        ),
        "memory": peaks["load_safetensors"] / (in_flight + size),
    }


def table(results: dict[str, Any]) -> Table:
    """Throughput and memory."""
    rows = {
        kind: {
            name: {"rate": rate, "peak": runs["peak_MB"][name]}
            for name, rate in runs["GB/s"].items()
        }
        for kind, runs in ((kind, results[kind]) for kind in ("warm", "cold"))
    }
    columns = {"GB/s": "{rate:.2f}", "peak MB": "{peak:.0f}"}
    title = f"{results['bytes'] / 1e9:.2f} GB on {DEVICES} devices"
    return tables.by_pair(title, ("", "contestant"), columns, rows)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _mesh() -> Any:
    return iso.make_mesh((DEVICES,), ("x",))


def main() -> None:
    """Run, print a table, and save `benchmarks/results/safetensors.json`."""
    benchmark = Benchmark("safetensors", __doc__, rounds=ROUNDS, quick=1)
    options = benchmark.parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        size = write_model(folder, SIZE >> 4 if options.quick else SIZE)
        results = {
            "bytes": size,
            "in_flight": THREADS * CHUNK,
            "warm": measure(folder, size, options.rounds, cold=False),
            "cold": measure(folder, size, options.rounds, cold=True),
            "targets": {"ratio_to_raw": LEAST_RATIO, "memory": MOST_MEMORY},
        }
    rows = [
        f"{kind}: {results[kind]['ratio_to_raw']:.2f} of raw reads (at least {LEAST_RATIO}; "
        f"round by round {results[kind]['ratio_by_round']:.2f}), "
        f"memory {results[kind]['memory']:.2f} of shards and chunks (at most {MOST_MEMORY})"
        for kind in ("warm", "cold")
    ]
    benchmark.finish(results, table(results), *rows)


if __name__ == "__main__":
    main()
