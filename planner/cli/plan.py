"""`isoshard plan`: what a step needs on hardware that is not attached, and which plan to take.

    isoshard plan train.py:step --mesh v5e:16x16 --plan fsdp,tensor
    isoshard plan train.py:step --mesh v5e:16x16 --plan fsdp --plan fsdp,tensor   # side by side
    isoshard plan train.py:step --mesh h100:4x8 --plan auto --html plan.html
    isoshard plan --hf config.json --mesh v5p:8x8x8 --plan fsdp,tensor --depth partition
    isoshard plan --list                                # chips, and what can be planned here

No device of the machine is needed, and no weights are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from isoshard import planner
from isoshard.cli.output import Output
from isoshard.core.kit import Plan, PlanError, human_bytes, install_command
from isoshard.planner.machine.topologies import Topology
from isoshard.planner.reports.report import Report

from .plan_models import show_machines
from .plan_targets import Target, failure_in, plan_named, target_of
from .plan_words import WORDS, PlanCommandError, axes_of, bytes_of, is_words, plan_of, spelled

_NAME = "isoshard plan"


def main(argv: Sequence[str]) -> int:
    """Plan what `argv` names.

    Returns:
        0 if the step fits, under one of the plans; 1 if it does not; 2 for what cannot be planned;
        130 at Ctrl-C.
    """
    parse_args = _parser().parse_args(list(argv))
    console = Output(width=parse_args.width)
    path = sys.path[:]  # a script's folder is on it while the script is of use
    try:
        if parse_args.list:
            show_machines(console)
            return 0
        return _run(parse_args, console)
    except KeyboardInterrupt:
        print(f"{_NAME}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except planner.NothingFitsError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not type(error).__module__.startswith("isoshard."):
            raise
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    finally:
        sys.path[:] = path


def _run(arguments: argparse.Namespace, console: Console) -> int:
    machine = _machine(arguments.mesh)
    for path in (arguments.html, arguments.json):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise PlanCommandError(f"{path} cannot be written: its folder does not exist")
    target = _target(arguments, machine)
    if twice := [text for text in arguments.plan if arguments.plan.count(text) > 1]:
        raise PlanCommandError(f"--plan {twice[0]} is repeated")
    cases = [_case(arguments, target, machine, text) for text in arguments.plan or [None]]
    memory = None if arguments.memory is None else bytes_of(arguments.memory)
    limits = {} if arguments.timeout is None else {"timeout": arguments.timeout}
    reports, found = {}, []
    for case in cases:
        _told(f"planning {target.name} on {machine.name}: {case.name}")
        mesh, plan = case.mesh, case.plan
        try:
            if case.name == "auto":
                depth = "trace" if arguments.depth == "trace" else "partition"
                result = planner.search(target.step, target.args, mesh, memory=memory, depth=depth)
                found.append(str(result))
                mesh, plan = result.mesh, result.plan
            report = planner.estimate(
                target.step, target.args, mesh, plan,
                depth=arguments.depth, memory=memory, **limits,
            )  # fmt: skip
        except PlanError as error:
            which = f"--plan {case.name}: " if case.name in arguments.plan else ""
            raise PlanCommandError(f"{which}{error}") from error
        except Exception as error:
            own = failure_in(error, target.file)
            if type(error).__module__.startswith("isoshard.") or not own:
                raise
            raise PlanCommandError(f"{target.name} fails when it is traced, at {own}") from error
        reports[case.name] = dataclasses.replace(report, plan=case.words or report.plan)
    _written(arguments, reports)
    status = _shown(reports, console)
    for text in found:
        console.print(Text(f"\n{text}"))
    return status


@dataclasses.dataclass(frozen=True)
class _Case:
    """One plan to estimate.

    Attributes:
        name: as it was given.
        mesh: for it; of "auto" perhaps the machine.
        plan: it; None replicates, and of "auto" stands for one to be found.
        words: that say it shorter than it prints.
    """

    name: str
    mesh: Mesh | Topology
    plan: Plan | None
    words: str = ""


def _case(
    arguments: argparse.Namespace, target: Target, machine: Topology, text: str | None
) -> _Case:
    if text == "auto" and arguments.axes is None:
        return _Case(text, machine, None)
    words = text if text is not None and is_words(text) else None
    axes = axes_of(arguments.axes, machine, words)
    mesh = machine.mesh(tuple(axes.values()), tuple(axes))
    if text is None or text == "auto":
        return _Case(text or "replicated", mesh, None)
    if words is not None:
        return _Case(text, mesh, plan_of(words, axes, target.weights), spelled(words, axes))
    return _Case(text, mesh, plan_named(text, mesh))


def _told(text: str) -> None:
    """Say what is being done, to somebody who looks on."""
    if sys.stderr.isatty():
        print(f"{text} ..", file=sys.stderr)


def _machine(text: str | None) -> Topology:
    if text is None:
        raise PlanCommandError(
            "on which machine? give --mesh, such as --mesh v5e:16x16; isoshard plan --list shows "
            "chips"
        )
    return planner.topology(text)


def _target(arguments: argparse.Namespace, machine: Topology) -> Target:
    if arguments.hf is not None:
        if arguments.target is not None:
            raise PlanCommandError("give either script.py:step or --hf config.json, not both")
        if missing := [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]:
            raise PlanCommandError(
                f"--hf needs {' and '.join(missing)}, which is not installed. "
                f"Fix: {install_command('models')}"
            )
        models = importlib.import_module("isoshard.planner.cli.plan_models")
        return models.model_target(
            arguments.hf,
            batch=arguments.batch or machine.size,
            sequence=arguments.sequence,
            dtype=arguments.dtype,
            pad_vocab=arguments.pad_vocab or 1,
        )
    if arguments.target is None:
        raise PlanCommandError(
            "what is to be planned? give script.py:step, or --hf config.json for a model of "
            "transformers"
        )
    for_models = ("batch", "sequence", "dtype", "pad_vocab")
    if wrong := [
        f"--{name.replace('_', '-')}" for name in for_models if getattr(arguments, name) is not None
    ]:
        raise PlanCommandError(f"{wrong[0]} is for --hf; a script's arguments say it themselves")
    return target_of(arguments.target, arguments.args)


def _written(arguments: argparse.Namespace, reports: dict[str, Report]) -> None:
    alone = next(iter(reports.values())) if len(reports) == 1 else None
    shown = alone if alone is not None else planner.compare(reports)
    try:
        if arguments.html is not None:
            shown.write_html(arguments.html)
        if arguments.json is not None:
            Path(arguments.json).write_text(shown.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanCommandError(f"{error.filename} cannot be written: {error.strerror}") from None


def _shown(reports: dict[str, Report], console: Console) -> int:
    if len(reports) == 1:
        next(iter(reports.values())).show(console=console)
    else:
        planner.compare(reports).show(console=console)
    if any(report.fits for report in reports.values()):
        return 0
    name, least = min(reports.items(), key=lambda pair: pair[1].memory.peak)
    over = human_bytes(least.memory.peak - least.memory.capacity)
    which = "" if len(reports) == 1 else f"; the least is {name}"
    print(f"{_NAME}: does not fit, by {over} a device{which}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="What a step needs on hardware that is not attached: memory, traffic, time.",
        epilog="Exit status: 0 if it fits under one of the plans, 1 if not, 2 for what cannot be "
        "planned.",
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="script.py:step", help="a function, or a compiled step")
    add("--hf", metavar="config.json", help="instead: a model of transformers, trained by AdamW")
    add("--mesh", metavar="MACHINE", help="such as v5e:16x16, h100:4x8, v5e:2*16x16, cpu:8")
    add("--axes", metavar="A=N,B=M", help="axes of the mesh, such as data=16,model=16")
    add(
        "--plan", action="append", default=[], metavar="PLAN",
        help=f"{', '.join(WORDS)}, with commas between; auto; script.py:my_plan. Several: side by "
        "side",
    )  # fmt: skip
    add(
        "--depth", choices=("trace", "partition", "compile"), default="trace",
        help="from the traced step alone (the default), XLA's partitioner, the target's compiler",
    )  # fmt: skip
    add("--memory", metavar="SIZE", help="of one device, such as 16GB, instead of the chip's")
    add("--args", metavar="script.py:make", help="example arguments, or what makes them")
    add("--batch", type=_positive, metavar="N", help="with --hf: samples of a step (one a device)")
    add("--sequence", type=_positive, metavar="N", help="with --hf: tokens of a sample")
    add("--dtype", help="with --hf: of the parameters, such as bfloat16 (as configured)")
    add(
        "--pad-vocab", type=_positive, metavar="N",
        help="with --hf: round the vocabulary up to a multiple of N, as is done to split it",
    )  # fmt: skip
    add("--html", metavar="FILE", help="write the report as a page")
    add("--json", metavar="FILE", help="write the report as JSON")
    add("--timeout", type=_seconds, metavar="S", help="seconds that one compilation may take (600)")
    add("--width", type=_positive, metavar="N", help="columns (the terminal's)")
    add("--list", action="store_true", help="show chips, and what can be planned here")
    return parser


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(f"needs seconds, more than 0, not {text!r}")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number, 1 or more, not {text!r}")
    return int(text)
