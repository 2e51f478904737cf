"""`isoshard plan --list`: the chips that machines are made of, and what can be planned here."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.planner.machine.chips import Chip, chips
from isoshard.core.runtime.metrics import human_bytes

EXAMPLES = {"tpu2": "16x16", "tpu3": "8x8x8", "gpu0": "2x8", "cpu0": "64"}
"""A grid by platform and axes of the torus."""
COMPILERS = {
    "tpu": ("libtpu", "libtpu", "pip install libtpu"),
    "gpu": (
        "jax_plugins.xla_cuda12",
        "jax-cuda12-plugin",
        'pip install "jax[cuda12]" (about 3 GB; no GPU is needed)',
    ),
}
"""What compiles for a platform: a module, its package, how to get it."""


def show_machines(console: Console) -> None:
    """Print chips and targets.

    Args:
        console: where to.
    """
    console.print(Text("Chips (--mesh CHIP:GRID; slices as in v5e:2*16x16)", style="bold"))
    table = Table(
        box=None if console.options.ascii_only else SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.add_column("chip", no_wrap=True)
    for name in ("memory", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "network GB/s"):
        table.add_column(name, justify="right")
    table.add_column("such as", no_wrap=True)
    for one in chips():
        links = f"{one.link / 1e9:.3g}{f' x {one.links}' if one.links else ''}"
        table.add_row(
            one.name,
            human_bytes(one.memory),
            f"{one.rate('bfloat16') / 1e12:.3g}",
            f"{one.bandwidth / 1e9:.4g}",
            links,
            f"{one.network / 1e9:.3g}",
            f"{one.name}:{_grid(one)}",
        )
    console.print(table)
    console.print(Text("\nDepths", style="bold"))
    console.print(Text("trace      every machine: from the traced step and the plan alone"))
    console.print(Text("partition  every machine: XLA's partitioner on this host's CPU"))
    for platform in COMPILERS:
        console.print(Text(f"compile    {platform}: {compiler(platform)}"))
    console.print(Text("compile    cpu: XLA on this host's CPU"))


def compiler(platform: str) -> str:
    """What compiles for a platform here, or how to get it.

    Args:
        platform: "tpu" or "gpu".
    """
    module, package, fix = COMPILERS[platform]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return f"not installed; {fix}"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _grid(chip: Chip) -> str:
    if chip.shapes:
        return "x".join(map(str, chip.shapes[-1]))
    return EXAMPLES.get(f"{chip.platform}{chip.links}", "8")
