"""The largest buffers of attention, forward and backward, in programs for v5e and H100.

    python -m benchmarks.attention_memory ["v5e packed 4096" ..]

`F.scaled_dot_product_attention` and its gradients in bfloat16, one sample on each of four devices,
compiled for hardware that is not attached. `temporaries` is what the compiler's buffer assignment
allocates on a device, and `largest` the largest array in it. An array of queries by keys would have
at least one byte for each score, which is the last column. It needs the compilers: libtpu, and
JAX's plugin for CUDA with nvcc (`python -m benchmarks.environments aot`), in this environment or
in the one of ISOSHARD_COMPILER_PYTHON. For v5e they have splash attention where it takes the mask,
else tiles; for H100 tiles, since JAX traces cuDNN's attention only where there is a GPU.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import isoshard as iso
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.compile_worker import compiled
from isoshard.planner.programs.exporting import exported
from isoshard.planner.programs.targets import target_of
from isoshard.planner.torch_steps.torch_steps import traced_step
from tools.harness import tables
from tools.harness.command import Benchmark

TARGETS = {"v5e": ("v5e:2x2", "tpu"), "h100": ("h100:1x4", "cuda")}
SEQUENCES = (4096, 32768)
HEADS, KEY_HEADS, WIDTH, DEVICES = 4, 2, 64, 4
WINDOW = 1024
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


def mask_of(kind: str, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor | None:
    """A mask of queries by keys.

    Args:
        kind: one of `KINDS`.
        ids: int32 [batch, length], the document of each token.
        keep: bool [batch, length], the tokens that are no padding.
    """
    positions = torch.arange(ids.shape[-1], device=ids.device)
    rows, columns = positions[:, None], positions
    causal = columns <= rows
    if kind == "window":
        return causal & (columns > rows - WINDOW)
    if kind == "padding":
        return causal & keep[:, None, None, :]
    if kind == "packed":
        return causal & (ids[:, None, :, None] == ids[:, None, None, :])
    if kind == "bias":
        return torch.where(causal, (columns - rows).to(torch.bfloat16) * 0.1, -torch.inf)
    return None


KINDS = ("none", "causal", "window", "padding", "packed", "bias")


def step_of(kind: str) -> Any:
    """The step that is compiled: the result and the gradients of queries, keys and values."""

    def step(q: Any, k: Any, v: Any, grad: Any, ids: Any, keep: Any) -> Any:
        operands = [x.requires_grad_() for x in (q, k, v)]
        mask = mask_of(kind, ids, keep)
        causal = kind == "causal"
        out = scaled_dot_product_attention(
            *operands, attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        return out.detach(), *torch.autograd.grad(out, operands, grad)

    return step


def measure(target: str, kind: str, length: int) -> dict[str, Any]:
    """Compile one program and read its buffers."""
    machine, platform = TARGETS[target]
    described = topology(machine)
    mesh = described.mesh((DEVICES,), ("data",))

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(DEVICES, *shape, dtype=dtype, device="meta")

    rows, columns = (meta(heads, length, WIDTH) for heads in (HEADS, KEY_HEADS))
    of_tokens = meta(length, dtype=torch.int32), meta(length, dtype=torch.bool)
    args = (rows, columns, columns.clone(), rows.clone(), *of_tokens)
    plan = iso.Plan.data_parallel("data")
    program = exported(traced_step(step_of(kind), args, {}, mesh, plan), platform)
    result = compiled(program, target_of(mesh, described), timeout=1200)
    largest, size = largest_array(result.text)
    return {
        "temporaries_mib": result.memory["temp_size_in_bytes"] / 2**20,
        "largest": largest,
        "largest_mib": size / 2**20,
        "scores_mib": length**2 / 2**20,
        "versions": dict(result.versions),
    }


def largest_array(text: str) -> tuple[str, int]:
    """The largest array that a program's instructions make, those within fusions left out."""
    best, size = "", 0
    fused = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            fused = "fused" in line.split("(")[0]
        if fused:
            continue
        for dtype, extents in re.findall(r"\b([a-z]+\d*)\[([\d,]+)\]", line.partition(" = ")[2]):
            bytes_ = _BYTES.get(dtype, 4) * math.prod(map(int, extents.split(",")))
            if bytes_ > size:
                best, size = f"{dtype}[{extents}]", bytes_
    return best, size


def main() -> None:
    """Run the benchmark and save `benchmarks/results/attention_memory.json`."""
    benchmark = Benchmark("attention_memory", __doc__, docs=("models.md", markdown))
    lengths = [(target, kind, n) for target in TARGETS for kind in KINDS for n in SEQUENCES]
    programs = {f"{target} {kind} {n}": (target, kind, n) for target, kind, n in lengths}
    benchmark.add_workloads(programs)
    options = benchmark.parse()
    results = {name: measure(*programs[name]) for name in options.workloads}
    benchmark.finish(results, table(results), merge=True)


_TITLES = ["target", "mask", "S", "temporaries, MiB", "largest array", "MiB", "S x S"]


def _rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            *name.split(),
            f"{row['temporaries_mib']:.1f}",
            f"`{row['largest']}`",
            f"{row['largest_mib']:.1f}",
            f"{row['scores_mib']:.0f}",
        ]
        for name, row in results.items()
    ]


def table(results: dict[str, Any]) -> Table:
    """The results for the terminal."""
    shown = Table(*_TITLES)
    for row in _rows(results):
        shown.add_row(*row)
    return shown


def markdown(results: dict[str, Any]) -> str:
    """The results for docs/models.md."""
    return tables.markdown(_TITLES, _rows(results))


if __name__ == "__main__":
    main()
