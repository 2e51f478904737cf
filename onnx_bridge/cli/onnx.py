"""`isoshard onnx`: check an annotated ONNX model, show what each device stores of it, run it.

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
    args = _parser().parse_args(list(argv))
    try:
        return args.run(args)
    except (onnx.ModelError, onnx.AnnotationError) as error:
        print(f"isoshard onnx {args.command}: {error}", file=sys.stderr)
        return 2


def check(args: argparse.Namespace) -> int:
    """Print what `validate` finds."""
    findings = onnx.validate(args.file, args.config)
    shown = [finding for finding in findings if args.all or finding.severity != "info"]
    counts = Counter(finding.severity for finding in findings)
    if args.json:
        fields = ("rule", "severity", "message", "node", "tensor", "axis", "configuration")
        print(json.dumps([{name: getattr(finding, name) for name in fields} for finding in shown]))
    else:
        print("\n".join(map(str, shown)), end="\n" if shown else "")
        hidden = "" if args.all or not counts["info"] else " (--all shows it)"
        print(
            f"{args.file}: {_count(counts['error'], 'error')}, "
            f"{_count(counts['warning'], 'warning')}, {counts['info']} for information{hidden}"
        )
    return 1 if counts["error"] else 0


def show(args: argparse.Namespace) -> int:
    """Print what each device stores."""
    from .onnx_drawing import draw

    width = args.width or shutil.get_terminal_size((100, 24)).columns
    color = sys.stdout.isatty() if args.color is None else args.color
    sizes = dict(args.size)
    print(draw(args.file, args.config, sizes=sizes, width=width, color=color))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoshard onnx", description="ONNX models with shardings and pipeline stages."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = _command(commands, "check", check, "what is wrong with a model's annotations")
    checking.add_argument("--all", action="store_true", help="warnings and information as well")
    checking.add_argument("--json", action="store_true", help="as a list, for programs")
    showing = _command(commands, "show", show, "what each device stores, stage by stage")
    showing.add_argument(
        "--size", type=_size, action="append", default=[], metavar="NAME=N",
        help="a number for a symbol in shapes, e.g. batch=8",
    )  # fmt: skip
    showing.add_argument("--width", type=int, help="columns (the terminal's)")
    showing.add_argument("--color", action=argparse.BooleanOptionalAction, help="a colour a block")
    onnx_run.add(_command(commands, "run", onnx_run.run, "run a model on its devices"))
    return parser


def _command(commands, name: str, run, help_text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("file", help="the model")
    parser.add_argument("--config", help="name of the device configuration, if there are several")
    parser.set_defaults(run=run)
    return parser


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write a name and a number, as in batch=8")
    return name, int(value)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
