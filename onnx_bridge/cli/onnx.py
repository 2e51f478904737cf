"""`isoshard onnx`: check an annotated ONNX model, show what each device holds of it, run it.

    isoshard onnx check model.onnx              # exit status 1 if there are errors
    isoshard onnx check model.onnx --json
    isoshard onnx show model.onnx --size batch=8
    isoshard onnx run model.onnx inputs.npz --out outputs.npz

The first two need none of the devices that the model is for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence

from isoshard import onnx

from . import onnx_run


def main(argv: Sequence[str]) -> int:
    """Run a subcommand.

    Args:
        argv: the command line after `isoshard onnx`.

    Returns:
        0 if all is well, 1 if `check` finds errors, 2 for a file that cannot be read.
    """
    given = _parser().parse_args(list(argv))
    try:
        return given.run(given)
    except (onnx.ModelError, onnx.AnnotationError) as error:
        print(f"isoshard onnx {given.command}: {error}", file=sys.stderr)
        return 2


def check(given: argparse.Namespace) -> int:
    """Print what `validate` finds."""
    findings = onnx.validate(given.file, given.config)
    shown = [one for one in findings if given.all or one.severity != "info"]
    counts = Counter(one.severity for one in findings)
    if given.json:
        fields = ("rule", "severity", "message", "node", "tensor", "axis", "configuration")
        print(json.dumps([{name: getattr(one, name) for name in fields} for one in shown]))
    else:
        print("\n".join(map(str, shown)), end="\n" if shown else "")
        hidden = "" if given.all or not counts["info"] else " (--all shows it)"
        print(
            f"{given.file}: {_count(counts['error'], 'error')}, "
            f"{_count(counts['warning'], 'warning')}, {counts['info']} for information{hidden}"
        )
    return 1 if counts["error"] else 0


def show(given: argparse.Namespace) -> int:
    """Print what each device holds."""
    from .onnx_drawing import draw

    width = given.width or shutil.get_terminal_size((100, 24)).columns
    color = sys.stdout.isatty() if given.color is None else given.color
    sizes = dict(given.size)
    print(draw(given.file, given.config, sizes=sizes, width=width, color=color))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoshard onnx", description="ONNX models with shardings and pipeline stages."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = _command(commands, "check", check, "what is wrong with a model's annotations")
    checking.add_argument("--all", action="store_true", help="what is no fault as well")
    checking.add_argument("--json", action="store_true", help="as a list, for programs")
    showing = _command(commands, "show", show, "what each device holds, stage by stage")
    showing.add_argument(
        "--size", type=_size, action="append", default=[], metavar="NAME=N",
        help="a number for a symbol in shapes, e.g. batch=8",
    )  # fmt: skip
    showing.add_argument("--width", type=int, help="columns (the terminal's)")
    showing.add_argument("--color", action=argparse.BooleanOptionalAction, help="a colour a block")
    onnx_run.add(_command(commands, "run", onnx_run.run, "run a model on its devices"))
    return parser


def _command(commands, name: str, run, what: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=what)
    parser.add_argument("file", help="the model")
    parser.add_argument("--config", help="name of the device configuration, if there are several")
    parser.set_defaults(run=run)
    return parser


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write a name and a number, as in batch=8")
    return name, int(number)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
