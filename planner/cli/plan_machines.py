"""`isoshard plan --list`: the chips that machines are made of, and what can be planned here."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.runtime.formatting import human_bytes
from isoshard.planner.machine.chips import Chip, chips
from isoshard.planner.programs.targets import planned

EXAMPLES = {"tpu2": "16x16", "tpu3": "8x8x8", "gpu0": "2x8", "cpu0": "64"}
"""A grid by platform and axes of the torus."""


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
    for chip in chips():
        links = f"{chip.link / 1e9:.3g}{f' x {chip.links}' if chip.links else ''}"
        table.add_row(
            chip.name,
            human_bytes(chip.memory),
            f"{chip.rate('bfloat16') / 1e12:.3g}",
            f"{chip.bandwidth / 1e9:.4g}",
            links,
            f"{chip.network / 1e9:.3g}",
            f"{chip.name}:{_grid(chip)}",
        )
    console.print(table)
    console.print(Text("\nWhat can be planned here", style="bold"))
    console.print(Text("depth trace: every machine"))
    for chip in planned():
        versions = ", ".join(f"{name} {version}" for name, version in chip.versions.items())
        compiles = f"no, {chip.problem}: {chip.fix}" if chip.problem else versions
        console.print(Text(f"{chip.title}: {compiles}"))


def _grid(chip: Chip) -> str:
    if chip.shapes:
        return "x".join(map(str, chip.shapes[-1]))
    return EXAMPLES.get(f"{chip.platform}{chip.links}", "8")
