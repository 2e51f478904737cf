"""The command `isoshard demo`.

>>> main(["--mesh", "2by4"])                        # stderr: .. '2by4' is no mesh: write 2x4, ..
2
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import AxisType

import isoshard as iso
from isoshard.core.installation import install_command

from . import crossing, data, training
from .model import BATCH, PLAN, Config, to_mesh
from .report import Report, save
from .training import Run, Settings

SIMULATED = (2, 4)
AGREE = 1e-5  # losses of the same buffers in two frameworks, relative
FULL = Settings(), Config()
SHORT = Settings(steps=100, validation_batches=8), Config(layers=2, width=128, length=64)
ALIKE = 20  # steps compared with plain torch: rounding grows with each
PICTURED = ("blocks.0.fc1.weight", "blocks.0.fc2.weight")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: the command line after `isoshard demo`; None reads it from `sys.argv`.

    Returns:
        0, or 1 if the frameworks disagree, or 2 if the demo cannot run with these options.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        print(
            "isoshard demo: --out draws loss.png with matplotlib, which is not installed. "
            f"Fix: {install_command('demo')}, or leave --out away.",
            file=sys.stderr,
        )
        return 2
    settings, config = FULL if options.full else SHORT
    if options.steps is not None:
        settings = dataclasses.replace(settings, steps=options.steps)
    try:
        return _Demo(settings, config, make_mesh(options.mesh), data.load()).run(options.out)
    except (iso.ShardingError, iso.errors.DeviceError, FileNotFoundError) as error:
        print(f"isoshard demo: {error}", file=sys.stderr)
        return 2


def make_mesh(shape: tuple[int, int] | None = None) -> iso.Mesh:
    """Arrange the accelerators, or else virtual CPU devices, as a ("data", "model") mesh.

    Its axes are Explicit, as those of `jax.make_mesh`.

    Args:
        shape: devices along each axis. By default (2, 4) virtual devices, or all accelerators,
            as many of them along "model" as divide by 4.

    Returns:
        The mesh.

    Raises:
        DeviceError: there are too few devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", math.prod(shape or SIMULATED))
    except RuntimeError:
        pass  # JAX is already running: use its devices
    if shape is None:
        count = len(jax.devices())
        shape = (count // math.gcd(count, 4), math.gcd(count, 4))
    return iso.make_mesh(shape, ("data", "model"), axis_types=AxisType.Explicit)


def farthest(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference between two runs' losses, step by step.

    Args:
        losses: of one run, none of them 0.
        others: of another, as many.

    Returns:
        0.0 for equal runs.

    Example:
        >>> farthest([4.0, 2.0], [4.0, 2.5])
        0.25
    """
    pairs = zip(losses, others, strict=True)
    return max((abs(other / loss - 1) for loss, other in pairs), default=0.0)


@dataclasses.dataclass
class _Demo:
    """One run of the demo.

    Attributes:
        settings: how long to train.
        config: sizes of the model.
        mesh: where.
        corpus: on what.
        report: the output.
        started: when it began.
    """

    settings: Settings
    config: Config
    mesh: iso.Mesh
    corpus: data.Corpus
    report: Report = dataclasses.field(default_factory=Report)
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def run(self, out: Path | None) -> int:
        iso.metrics.reset()
        self._introduce()
        self.report.heading("PyTorch trains on the mesh")
        model = to_mesh(training.new_model(self.config), self.mesh)
        self._draw(dict(model.named_parameters()))
        on_mesh = self._train("PyTorch, mesh", model, **training.on_mesh(self.mesh))
        programs = iso.metrics.compilations()
        for program in programs:
            self.report.line(f"compiled {program.what} in {program.seconds:.1f} s: {program.cause}")

        self.report.heading("JAX goes on with the same buffers")
        crossed = crossing.cross(model, self.config, self.mesh, self.corpus, self.settings)
        agree = self._compare(on_mesh, crossed)

        self.report.heading("The same run in plain PyTorch on the CPU, unsharded")
        on_cpu = self._train("PyTorch, CPU", training.new_model(self.config))

        self.report.heading("Results")
        runs = [on_mesh, crossed.function, crossed.flax, on_cpu]
        self.report.results(runs)
        difference = farthest(on_mesh.losses[:ALIKE], on_cpu.losses[:ALIKE])
        facts = {**self._facts(), "programs compiled": len(programs), **_proof(crossed)}
        facts["losses apart"] = difference
        self.report.line(
            f"\nthe losses of the first {min(ALIKE, self.settings.steps)} steps, on the mesh and "
            f"in plain PyTorch, are at most {difference:.1e} apart\n"
            f"{len(programs)} programs compiled for PyTorch, {crossed.copied_bytes} bytes copied "
            f"between the frameworks, {facts['seconds']:.0f} s in all"
        )
        for path in save(out, runs, facts) if out else ():
            self.report.line(f"wrote {path}")
        if self.config != FULL[1]:
            self.report.line("isoshard demo --full trains a larger model for longer")
        return 0 if agree else 1

    def _introduce(self) -> None:
        corpus, mesh = self.corpus, self.mesh
        device = mesh.devices.flat[0]
        kind = "virtual CPU devices" if device.platform == "cpu" else device.device_kind
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        self.report.heading("One spec for PyTorch and JAX")
        self.report.line(
            f"text    Python's standard library: {corpus.train_files} files, "
            f"{corpus.train.size / 1e6:.1f} MB to learn from, {corpus.validation_files} others, "
            f"{corpus.validation.size / 1e6:.1f} MB, to validate\n"
            f"mesh    {axes} of {mesh.size} {kind}\n"
            f"plan    parameters by name:"
        )
        for pattern, spec in PLAN.rules:
            self.report.line(f"          {pattern:<10} {spec}")

    def _draw(self, parameters: dict[str, torch.Tensor]) -> None:
        count = sum(parameter.numel() for parameter in parameters.values())
        self.report.line(
            f"{count / 1e6:.1f} M parameters, {len(parameters)} tensors; three pictures:"
        )
        tokens = torch.zeros(self.settings.batch, self.config.length, dtype=torch.long)
        pictured = {name: parameters[name] for name in PICTURED}
        for name, tensor in (pictured | {"tokens": iso.shard(tokens, self.mesh, BATCH)}).items():
            self.report.picture(name, tensor)
        self.report.line("")

    def _train(self, name: str, model: torch.nn.Module, **how: Callable[..., Any]) -> Run:
        with self.report.progress(name, self.settings.steps) as progress:
            return training.train(name, model, self.corpus, self.settings, progress, **how)

    def _compare(self, on_mesh: Run, crossed: crossing.Crossing) -> bool:
        """Say whether JAX computes the loss that torch did."""
        agree = True
        self.report.line(f"validation loss of {on_mesh.name}: {on_mesh.validation:.7f}")
        for run in (crossed.function, crossed.flax):
            off = abs(run.validation / on_mesh.validation - 1)
            agree &= off <= AGREE
            result = "agrees" if off <= AGREE else f"DIFFERS by more than {AGREE:g}"
            self.report.line(f"  as a {run.name}: {run.validation:.7f}, {result} ({off:.1e})")
        self.report.line(
            f"{crossed.shared} of {crossed.buffers} parameter buffers have one address in torch, "
            f"the JAX function and the Flax twin; {crossed.copied_bytes} bytes were copied"
        )
        return agree

    def _facts(self) -> dict[str, Any]:
        return {
            "seconds": time.perf_counter() - self.started,
            "settings": dataclasses.asdict(self.settings),
            "model": dataclasses.asdict(self.config),
            "mesh": dict(self.mesh.shape),
            "devices": self.mesh.devices.flat[0].device_kind,
            "cores": os.cpu_count(),
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "torch": torch.__version__,
            },
            "training files": self.corpus.train_files,
            "validation files": self.corpus.validation_files,
        }


def _proof(crossed: crossing.Crossing) -> dict[str, int]:
    fields = ("copied_bytes", "buffers", "shared")
    return {name.replace("_", " "): getattr(crossed, name) for name in fields}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoshard demo",
        description="Train a transformer on a mesh from PyTorch, continue in JAX on its buffers.",
    )
    steps = f"of training (default {SHORT[0].steps}, with --full {FULL[0].steps})"
    parser.add_argument("--steps", type=_positive, help=steps)
    parser.add_argument("--mesh", type=_shape, metavar="2x4", help='devices, "data" x "model"')
    parser.add_argument("--out", type=Path, metavar="DIR", help="save loss.png and demo.json there")
    parser.add_argument("--full", action="store_true", help="a larger model, trained for longer")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: write 1 or more")
    return int(text)


def _shape(text: str) -> tuple[int, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no mesh: write 2x4, the devices along "data" and along "model"'
        )
    return int(sizes[0]), int(sizes[1])
