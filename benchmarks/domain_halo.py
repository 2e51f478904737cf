"""Operators that read neighbours: windows, even and uneven, beside the halos that XLA derives.

One process with 4 virtual CPU devices, which share the machine's cores; a field of 512 x 512 with
its rows split. "xla" is the plain operator in `jax.jit` on even shards, nothing of isoshard in it.
"even, auto" and "even, windows" are `iso.domain`'s on the same array, "uneven" on shards of 120,
136, 120 and 136 rows, "odd" of 121, 135, 119 and 137 (whose windows begin at another row of each
stride), "very uneven" of 160, 96, 144 and 112. All devices wait for the largest shard, so `largest`
(its rows over the mean) is the least ratio to even that other shards can have here.

    python -m benchmarks.domain_halo            # written to results/domain_halo.json
    python -m benchmarks.domain_halo --quick    # a small field, few rounds, nothing written
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

import isoshard as iso
from isoshard.domain.windows.conv import conv
from isoshard.domain.windows.pool import max_pool
from isoshard.domain.windows.resize import interpolate
from tools.harness import tables, timing
from tools.harness.command import Benchmark

DEVICES = 4
SPEC = (None, None, "x", None)
SPLITS = {
    "uneven": (120, 136, 120, 136),
    "odd": (121, 135, 119, 137),
    "very uneven": (160, 96, 144, 112),
}

Function = Callable[..., Any]


def operators(mesh: Any) -> dict[str, tuple[Function, Function]]:
    """For each operator the plain form, and ours with a method."""

    def plain_conv(x: Any, w: Any, stride: int) -> Any:
        return lax.conv_general_dilated(x, w, (stride, stride), [(1, 1), (1, 1)])

    def plain_pool(x: Any, w: Any) -> Any:
        del w
        low = np.float32(-np.inf)
        return lax.reduce_window(
            x, low, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1))
        )

    def plain_resize(x: Any, w: Any) -> Any:
        del w
        return jax.image.resize(
            x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), "linear", antialias=False
        )

    place = {"mesh": mesh, "spec": SPEC}
    return {
        "conv 3x3": (
            functools.partial(plain_conv, stride=1),
            lambda x, w, method: conv(x, w, padding=1, method=method, **place),
        ),
        "conv 3x3, stride 2": (
            functools.partial(plain_conv, stride=2),
            lambda x, w, method: conv(x, w, stride=2, padding=1, method=method, **place),
        ),
        "max pool 3, stride 2": (
            plain_pool,
            lambda x, w, method: max_pool(x, 3, stride=2, padding=1, method=method, **place),
        ),
        "bilinear x 2": (
            plain_resize,
            lambda x, w, method: interpolate(x, scale=2, mode="linear", **place),
        ),
    }


def compiled(function: Function, x: Any, w: Any, backward: bool) -> Callable[[], Any]:
    """The function on these arrays, or its gradients, as something to time."""

    def loss(x: Any, w: Any) -> Any:
        out = function(x, w)
        if isinstance(out, iso.UnevenArray):
            return (out.array**2).sum(where=out.mask())
        return (out**2).sum()

    program = jax.jit(jax.grad(loss, (0, 1)) if backward else function)
    return lambda: jax.block_until_ready(program(x, w))


def uneven(x: np.ndarray, sizes: tuple[int, ...], mesh: Any) -> iso.UnevenArray:
    """Lay out shards of these sizes."""
    block = max(sizes)
    parts = np.split(x, np.cumsum(sizes)[:-1], 2)
    padded = [
        np.pad(part, [(0, 0), (0, 0), (0, block - size), (0, 0)])
        for part, size in zip(parts, sizes, strict=True)
    ]
    array = iso.shard(np.concatenate(padded, 2), mesh, SPEC)
    return iso.UnevenArray(array, x.shape, (None, None, sizes, None))


def scaled(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The sizes for another number of rows.

    >>> scaled((121, 135, 119, 137), 64)
    (15, 17, 14, 18)
    """
    ends = [end * rows // sum(sizes) for end in itertools.accumulate(sizes)]
    return tuple(end - begin for begin, end in itertools.pairwise([0, *ends]))


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Time every operator, forward and backward."""
    mesh = iso.make_mesh((DEVICES,), ("x",))
    rng = np.random.default_rng(0)
    field = rng.normal(size=(1, 8, rows, rows)).astype(np.float32)
    x, w = iso.shard(field, mesh, SPEC), jnp.asarray(rng.normal(size=(8, 8, 3, 3)), jnp.float32)
    w = iso.shard(w, mesh, None)
    splits = {name: scaled(sizes, rows) for name, sizes in SPLITS.items()}
    shards = {name: uneven(field, sizes, mesh) for name, sizes in splits.items()}
    results: dict[str, Any] = {
        "field": field.shape,
        "largest": {name: max(sizes) * DEVICES / rows for name, sizes in splits.items()},
    }
    for name, (plain, ours) in operators(mesh).items():
        for backward in (False, True):
            contestants = {"xla": compiled(plain, x, w, backward)}
            for method in ("auto", "windows"):
                chosen = functools.partial(ours, method=method)
                contestants[f"even, {method}"] = compiled(chosen, x, w, backward)
            for split, array in shards.items():
                chosen = functools.partial(ours, method="auto")
                contestants[split] = compiled(chosen, array, w, backward)
            times = timing.summary(timing.interleave(contestants, rounds=rounds), "xla")
            label = f"{name}, {'gradients' if backward else 'forward'}"
            results[label] = times
            summary = "  ".join(
                f"{k} {v['median_ms']:.2f} ({v['ratio']:.2f})" for k, v in times.items()
            )
            print(f"{label}: {summary}", flush=True)
    return results


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found."""
    rows = {name: row for name, row in results.items() if "xla" in row}
    columns = {"XLA": "{xla[median_ms]:.1f} ms"}
    columns |= {
        name: f"{{{name}[ratio]:.2f}}" for name in next(iter(rows.values())) if name != "xla"
    }
    size = " x ".join(map(str, results["field"]))
    return tables.by_name(f"{size} on {DEVICES} devices, over XLA's own", columns, rows)


markdown = tables.documented(table)


def main() -> None:
    """Measure, and write what was found."""
    benchmark = Benchmark(
        "domain_halo", __doc__, rounds=25, quick=3, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    iso.simulate_devices(DEVICES)
    benchmark.finish(measure(64 if options.quick else 512, options.rounds))


if __name__ == "__main__":
    main()
