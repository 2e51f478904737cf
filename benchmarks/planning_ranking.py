"""Benchmark: does the planner's roofline put published training steps in the order they ran in?

    python -m benchmarks.planning_ranking [--quick]

MaxText publishes what its 16B, 32B, 64B and 128B models reach on 1 to 32 slices of v5e-256, and the
scripts that ran them. Here each step is written down as what one chip does (`step_of`), from the
published sizes alone, and `costs.roofline` tells its seconds. Nothing runs on a device.

Shown are published and predicted seconds, and the rank correlation (Spearman) of both, over all
rows and over those of 1 and 32 slices; and that of the TFLOP/s a chip, which is harder, since sizes
and batches no longer order the rows. `PREDICTORS` names what predicts, so that another can stand
beside the step that is written down here.

Sources, all of https://github.com/AI-Hypercomputer/maxtext:
rows: MaxText/configs/v5e/README.md; batch, mesh, rematerialization: 16b.sh, 32b.sh, 64b.sh, 128b.sh
beside it; sizes: MaxText/configs/base.yml, scaled by `get_individual_scales` of pyconfig.py; which
operations TFLOP/s counts: `calculate_tflops_training_per_device` of maxtext_utils.py.

Physical assumptions, the same for all rows, beside those that `costs.roofline` states:

- attention kernels reach `ATTENTION` of the peak (softmax on the vector unit), and skip what the
  causal mask hides;
- weights are gathered in bfloat16, once for the forward and once for the backward pass; gradients
  are summed over a slice in bfloat16, over DCN in float32 (parameters are float32, and the compiler
  option data_parallel_all_reduce_opt takes that sum out of the loop of layers);
- under `minimal_offloaded` no product is computed twice, and copies to the host run beside them;
- DCN gives each chip its share of its host's network (the chip table).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.planner.costs.device_program import DeviceOp, DeviceProgram
from isoshard.core.planner.costs.roofline import time_of
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.reports.report import MemoryEstimate, TimeEstimate
from tools.harness import tables
from tools.harness.command import Benchmark

ATTENTION = 0.4
"""Of the peak what an attention kernel reaches."""

SEQUENCE, VOCABULARY, HEAD = 2048, 32_000, 128

PUBLISHED = {
    # model: TFLOP/s a chip on 1, 2, 4, 8, 16 and 32 slices
    "16B": (120, 117, 117, 115, 111, 108),
    "32B": (132, 128, 126, 125, 123, 119),
    "64B": (118, 112, 110, 108, 105, 99),
    "128B": (110, 110, 108, 104, 100, 91),
}
SLICES = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A published configuration.

    Attributes:
        width: of the residual stream.
        heads: of attention, of `HEAD` each.
        hidden: of the gated MLP.
        layers: how many.
        batch: sequences of `SEQUENCE` tokens a chip.
        tensor: chips that share one layer's products; the rest of a slice is FSDP.
        recomputes: the backward pass computes each layer again.
    """

    width: int
    heads: int
    hidden: int
    layers: int
    batch: int
    tensor: int = 1
    recomputes: bool = True

    @property
    def attended(self) -> int:
        """Width of all heads."""
        return self.heads * HEAD

    @property
    def layer_weights(self) -> int:
        """Parameters of a layer."""
        return 4 * self.width * self.attended + 3 * self.width * self.hidden

    @property
    def weights(self) -> int:
        """Parameters of all layers and both embeddings."""
        return self.layers * self.layer_weights + 2 * self.width * VOCABULARY

    @property
    def counted(self) -> float:
        """Operations a chip that the published TFLOP/s count: nothing that is recomputed."""
        tokens = self.batch * SEQUENCE
        causal = 6 * self.attended * self.layers * SEQUENCE
        return tokens * (6 * self.weights + causal)


MODELS = {
    "16B": Decoder(4096, 64, 28672, 32, 6),
    "32B": Decoder(8192, 64, 28672, 32, 4),
    "64B": Decoder(8192, 64, 28672, 64, 2),
    "128B": Decoder(8192, 128, 57344, 64, 1, tensor=16, recomputes=False),
}


def mesh_of(model: Decoder, slices: int) -> Mesh:
    """The mesh of a published run: slices along `data`.

    Args:
        model: which.
        slices: how many slices of 256 chips.
    """
    machine = topology(f"v5e:{slices}*16x16" if slices > 1 else "v5e:16x16")
    shape = (slices, 256 // model.tensor, model.tensor)
    return machine.mesh(shape, ("data", "fsdp", "tensor"))


def step_of(model: Decoder, mesh: Mesh) -> DeviceProgram:
    """One training step as what one chip does.

    Args:
        model: which.
        mesh: with axes `data`, `fsdp` and `tensor`.
    """
    data, fsdp, tensor = (mesh.shape[name] for name in ("data", "fsdp", "tensor"))
    tokens = model.batch * SEQUENCE * tensor
    loop = model.layers
    forward = _layer(model, tokens, tensor, loop, 1)
    again = _layer(model, tokens, tensor, loop, 2) if model.recomputes else []
    weights = 2 * model.layer_weights // tensor
    ops = [
        *_products("embedding", tokens, [(model.width, VOCABULARY // tensor)], 3),
        _talk("all-gather", "fsdp", weights, loop, 1),
        *forward,
        _talk("all-gather", "fsdp", weights, loop, 2),
        *again,
        *_backward(model, tokens, tensor, loop, 2),
        _talk("reduce-scatter", "fsdp", weights, loop, 2),
    ]
    shard = model.weights // (fsdp * tensor)
    if data > 1:
        ops.append(_talk("all-reduce", "data", 4 * shard))
    # AdamW in float32: reads parameter, gradient and two moments, writes three; clipping reads
    # the gradient once more.
    ops.append(DeviceOp("adamw", "optimizer", 12.0 * shard, 32.0 * shard))
    used = (op for op in ops if not op.axes or math.prod(mesh.shape[a] for a in op.axes) > 1)
    return DeviceProgram(tuple(used), MemoryEstimate(0, 0, 0, 0, 0, 0, "", (), 0))


def _layer(model: Decoder, tokens: int, tensor: int, times: int, scope: int) -> list[DeviceOp]:
    """A layer's forward pass."""
    stream = 2 * tokens * model.width
    attended, hidden = model.attended // tensor, model.hidden // tensor
    return [
        _talk("all-gather", "tensor", stream, times, scope),
        *_products("qkv", tokens, [(model.width, 3 * attended)], 1, times, scope),
        _attention(tokens, attended, 2, times, scope),
        *_products("out", tokens, [(attended, model.width)], 1, times, scope),
        _talk("reduce-scatter", "tensor", stream, times, scope),
        _talk("all-gather", "tensor", stream, times, scope),
        *_products("wi", tokens, [(model.width, 2 * hidden)], 1, times, scope),
        DeviceOp("silu", "mlp", 0.0, 6.0 * tokens * hidden, "bfloat16", times, scope=scope),
        *_products("wo", tokens, [(hidden, model.width)], 1, times, scope),
        _talk("reduce-scatter", "tensor", stream, times, scope),
        # Two norms, two additions: each reads and writes the stream.
        DeviceOp("norm", "layer", 0.0, 8.0 * stream / tensor, "bfloat16", times, scope=scope),
    ]


def _backward(model: Decoder, tokens: int, tensor: int, times: int, scope: int) -> list[DeviceOp]:
    """A layer's gradients: two products for each of the forward pass."""
    stream = 2 * tokens * model.width
    attended, hidden = model.attended // tensor, model.hidden // tensor
    matrices = [
        (model.width, 3 * attended),
        (attended, model.width),
        (model.width, 2 * hidden),
        (hidden, model.width),
    ]
    # Of attention and of the MLP: gather the cotangent, gather the input again, scatter the result.
    talks = ("all-gather", "all-gather", "reduce-scatter") * 2
    return [
        *(_talk(kind, "tensor", stream, times, scope) for kind in talks),
        *_products("backward", tokens, matrices, 2, times, scope),
        _attention(tokens, attended, 5, times, scope),
        DeviceOp("silu", "mlp", 0.0, 10.0 * tokens * hidden, "bfloat16", times, scope=scope),
        DeviceOp("norm", "layer", 0.0, 12.0 * stream / tensor, "bfloat16", times, scope=scope),
    ]


def _products(
    name: str,
    tokens: int,
    matrices: Sequence[tuple[int, int]],
    each: int,
    times: int = 1,
    scope: int = 0,
) -> list[DeviceOp]:
    return [
        DeviceOp(
            "dot_general",
            name,
            2.0 * tokens * rows * columns * each,
            2.0 * (tokens * (rows + columns) + rows * columns) * each,
            "bfloat16",
            times,
            scope=scope,
        )
        for rows, columns in matrices
    ]


def _attention(tokens: int, width: int, products: int, times: int, scope: int) -> DeviceOp:
    """Of `products` with all keys the causal half, as slow as `ATTENTION` says."""
    flops = products * 2.0 * tokens * SEQUENCE * width / 2
    moved = 2.0 * tokens * width * (2 + products)
    return DeviceOp(
        "attention", "attention", flops / ATTENTION, moved, "bfloat16", times, scope=scope
    )


def _talk(kind: str, axis: str, sent: int, times: int = 1, scope: int = 0) -> DeviceOp:
    waits = axis == "tensor"
    return DeviceOp(
        kind, axis, 0.0, 0.0, "bfloat16", times, (axis,), sent, scope=scope, waits=waits
    )


def by_hand(model: Decoder, mesh: Mesh) -> TimeEstimate:
    """Predict from the step written down here.

    Args:
        model: which.
        mesh: of the run.
    """
    return time_of(step_of(model, mesh), mesh)[0]


PREDICTORS: dict[str, Callable[[Decoder, Mesh], TimeEstimate]] = {"by hand": by_hand}
"""What predicts a step, by name."""


def measure(predictor: Callable[[Decoder, Mesh], TimeEstimate]) -> dict[str, Any]:
    """Predict all published rows.

    Args:
        predictor: one of `PREDICTORS`.

    Returns:
        `rows`, and `spearman` of seconds and TFLOP/s for both sums of the roofline.
    """
    rows = []
    for name, model in MODELS.items():
        for slices, rate in zip(SLICES, PUBLISHED[name], strict=True):
            time = predictor(model, mesh_of(model, slices))
            row = {
                "model": name,
                "slices": slices,
                "published": rate,
                "published_s": model.counted / rate / 1e12,
            }
            for how in ("serial", "overlapped"):
                taken = getattr(time, how)
                row |= {f"{how}_s": taken, how: model.counted / taken / 1e12}
            rows.append({**row, "limit": time.limit})
    found = {}
    for how in ("serial", "overlapped"):
        for unit, text in (("_s", "seconds"), ("", "TFLOP/s")):
            for which, some in (("all rows", SLICES), ("1 and 32 slices", (1, 32))):
                chosen = [row for row in rows if row["slices"] in some]
                pairs = ([row[f"{who}{unit}"] for row in chosen] for who in ("published", how))
                found[f"{how}, {text}, {which}"] = spearman(*pairs)
    return {"rows": rows, "spearman": found}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values have the mean of their ranks.

    Args:
        first: values.
        second: as many.

    Example:
        >>> spearman([1, 2, 3], [10, 30, 20])
        0.5
    """
    one, other = (_ranks(np.array(values, float)) for values in (first, second))
    return float(round(np.corrcoef(one, other)[0, 1], 6))


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below + (equal - 1) / 2


def table(found: Mapping[str, Any]) -> Any:
    """Show what `measure` found."""
    columns = {
        "published TFLOP/s": "{published:.0f}",
        "predicted, serial": "{serial:.0f}",
        "overlapped": "{overlapped:.0f}",
        "published s": "{published_s:.2f}",
        "predicted s, serial": "{serial_s:.2f}",
        "overlapped s": "{overlapped_s:.2f}",
        "limit": "{limit}",
    }
    rows = [([row["model"], f"{row['slices']} x 256"], row) for row in found["rows"]]
    return tables.table("MaxText on v5e", columns, rows, ("model", "chips"))


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_ranking.json`."""
    benchmark = Benchmark("planning_ranking", __doc__, quick=1)
    benchmark.parse()
    results = {name: measure(predictor) for name, predictor in PREDICTORS.items()}
    shown = []
    for name, found in results.items():
        shown.append(table(found))
        shown += [f"{name}: Spearman of {what} {r:.3f}" for what, r in found["spearman"].items()]
    benchmark.finish(results, *shown)


if __name__ == "__main__":
    main()
