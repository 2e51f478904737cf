"""What the demo prints and saves.

>>> report = Report(console=Console(width=80))
>>> run = Run("PyTorch, CPU", [5.5, 4.5], 1.25, 100.0, 4.6, 400.0)
>>> report.results([run])                                        # doctest: +NORMALIZE_WHITESPACE
                validation loss   train tokens/s   eval tokens/s   start-up
 PyTorch, CPU          4.600000              100             400     1.25 s
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import isoshard as iso

from .training import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 10  # steps averaged in the saved curve


@dataclasses.dataclass
class Report:
    """Prints to a console.

    Attributes:
        console: where to.
    """

    console: Console = dataclasses.field(default_factory=Console)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="dim")

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False)

    def picture(self, name: str, x: Any) -> None:
        """Draw a tensor's sharding."""
        drawing = iso.visualize(x, use_rich=self.console.is_terminal, width=self.console.width)
        self.console.print(f"\n[cyan]{name}")
        self.console.print(Text.from_ansi(drawing))

    @contextlib.contextmanager
    def progress(self, name: str, steps: int) -> Iterator[Callable[[int, float, float], None]]:
        """Show a progress bar; gives the function that moves it."""
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4}/{task.total}  {task.fields[state]}"),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(f"{name:<22}", total=steps, state="compiling")

            def update(step: int, loss: float, speed: float) -> None:
                rate = "" if math.isnan(speed) else f"  {speed:,.0f} tokens/s"
                bar.update(task, completed=step, state=f"loss {loss:.4f}{rate}")

            yield update

    def results(self, runs: Sequence[Run]) -> None:
        """Compare losses and speeds."""
        table = Table(box=None, header_style="bold")
        table.add_column("")
        for title in ("validation loss", "train tokens/s", "eval tokens/s", "start-up"):
            table.add_column(title, justify="right")
        for run in runs:
            table.add_row(
                run.name,
                f"{run.validation:.6f}",
                _number_text(run.speed),
                _number_text(run.validation_speed),
                "" if math.isnan(run.startup) else f"{run.startup:.2f} s",
            )
        self.console.print(table)


def save(folder: Path, runs: Sequence[Run], facts: dict[str, Any]) -> list[Path]:
    """Write the curves and the numbers.

    Args:
        folder: created if missing.
        runs: of which those with losses get a curve.
        facts: more for the JSON file.

    Returns:
        The files written: `loss.png` and `demo.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    picture, results = folder / "loss.png", folder / "demo.json"
    _curves(runs).savefig(picture, dpi=150)
    content = {**facts, "runs": [_plain(dataclasses.asdict(run)) for run in runs]}
    results.write_text(json.dumps(content, indent=1) + "\n")
    return [picture, results]


def _curves(runs: Sequence[Run]) -> Figure:
    from matplotlib.figure import Figure  # only --out wants it

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss (nats per byte)")
    for run, style in zip(
        (run for run in runs if run.losses), ("-", "--", ":", "-."), strict=False
    ):
        axes.plot(_smooth(run.losses), style, label=f"{run.name}, validation {run.validation:.4f}")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _smooth(losses: Sequence[float]) -> list[float]:
    return [
        sum(losses[max(0, end - SMOOTHING) : end]) / min(end, SMOOTHING)
        for end in range(1, len(losses) + 1)
    ]


def _number_text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}"


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in fields.items()
    }
