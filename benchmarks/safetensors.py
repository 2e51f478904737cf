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

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import isoshard as iso
from benchmarks import timing
from isoshard.core.weights.loading import CHUNK

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
    iso.save_safetensors(folder, weights, max_file_bytes=min(500_000_000, size // 4))
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
        for one in done:
            one.result()


CONTESTANTS: dict[str, Callable[[Path], Any]] = {
    "raw reads": read_raw,
    "raw, one buffer": read_over,
    "load_safetensors": load_ours,
    "library": load_by_library,
}


def one(name: str, folder: Path, cold: bool) -> dict[str, float]:
    """Run a contestant in this process."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.block_until_ready(iso.shard(np.ones((8, 8), np.float32), _mesh(), ("x",)))
    import safetensors  # noqa: F401  (before memory is measured)

    if cold:
        for path in _files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _memory("VmRSS")
    started = time.perf_counter()
    kept = CONTESTANTS[name](folder)
    seconds = time.perf_counter() - started
    peak = _memory("VmHWM") - before
    del kept
    return {"seconds": seconds, "peak": peak}


def measure(folder: Path, size: int, rounds: int, cold: bool) -> dict[str, Any]:
    """All contestants in turns, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(names).tolist():
            command = [sys.executable, "-m", "benchmarks.safetensors", "--one", name, str(folder)]
            done = subprocess.run(
                [*command, *(["--cold"] if cold else [])],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
                env={**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"},
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    seconds = {
        name: statistics.median(run["seconds"] for run in runs) for name, runs in found.items()
    }
    peaks = {name: max(run["peak"] for run in runs) for name, runs in found.items()}
    in_flight = THREADS * CHUNK
    return {
        "GB/s": {name: size / taken / 1e9 for name, taken in seconds.items()},
        "peak_MB": {name: peak / 1e6 for name, peak in peaks.items()},
        "seconds": {name: [run["seconds"] for run in runs] for name, runs in found.items()},
        "ratio_to_raw": seconds["raw reads"] / seconds["load_safetensors"],
        "ratio_by_round": statistics.median(
            raw["seconds"] / ours["seconds"]
            for raw, ours in zip(found["raw reads"], found["load_safetensors"], strict=True)
        ),
        "memory": peaks["load_safetensors"] / (in_flight + size),
    }


def table(results: dict[str, Any]) -> Table:
    """Throughput and memory."""
    shown = Table(title=f"{results['bytes'] / 1e9:.2f} GB on {DEVICES} devices")
    for column in ("", "contestant", "GB/s", "peak MB"):
        shown.add_column(column, justify="right")
    for kind in ("warm", "cold"):
        for name, rate in results[kind]["GB/s"].items():
            shown.add_row(kind, name, f"{rate:.2f}", f"{results[kind]['peak_MB'][name]:.0f}")
    return shown


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _mesh() -> Any:
    return iso.make_mesh((DEVICES,), ("x",))


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> None:
    """Run, print a table, and save `benchmarks/results/safetensors.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 MB, one round, nothing written")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], Path(options.one[1]), options.cold)))
        return
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        size = write_model(folder, SIZE >> 4 if options.quick else SIZE)
        rounds = 1 if options.quick else ROUNDS
        results = {
            "bytes": size,
            "in_flight": THREADS * CHUNK,
            **{kind: measure(folder, size, rounds, kind == "cold") for kind in ("warm", "cold")},
            "targets": {"ratio_to_raw": LEAST_RATIO, "memory": MOST_MEMORY},
        }
    console.print(table(results))
    for kind in ("warm", "cold"):
        console.print(
            f"{kind}: {results[kind]['ratio_to_raw']:.2f} of raw reads (at least {LEAST_RATIO}; "
            f"round by round {results[kind]['ratio_by_round']:.2f}), "
            f"memory {results[kind]['memory']:.2f} of shards and chunks (at most {MOST_MEMORY})"
        )
    if not options.quick:
        console.print(f"wrote {timing.save('safetensors', results)}")


if __name__ == "__main__":
    main()
