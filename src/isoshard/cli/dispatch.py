"""Which subcommand runs.

A subcommand is a module with `main(argv) -> int`; it is imported when it is called for, so that
`isoshard doctor` works where the demo's dependencies are missing.

>>> main(["--version"])
isoshard 0.2.0
0
>>> main(["dcotor"])     # stderr: no command 'dcotor', did you mean 'doctor'? The commands are ..
2
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

from isoshard.core.installation import install_command

COMMANDS = {
    "doctor": ("isoshard.cli.doctor", "what is installed, which devices, what works here"),
    "demo": ("isoshard.cli.demo", "train a transformer on a mesh from PyTorch, continue in JAX"),
    "run-torch-xla": (
        "isoshard.torch_xla_bridge.cli.run_torch_xla",
        "run a script of torch_xla's SPMD API",
    ),
    "plan": (
        "isoshard.planner.cli.plan",
        "plan a step for hardware that is not attached; search a plan",
    ),
    "onnx": (
        "isoshard.onnx_bridge.cli.onnx",
        "check, show or run an ONNX model that carries shardings",
    ),
}
EXTRAS = {
    "onnx": "onnx",
    "run-torch-xla": "torch",
}  # of the package, by command; others need "demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` names.

    Args:
        argv: the command line after `isoshard`; None reads it from `sys.argv`.

    Returns:
        The exit status: that of the subcommand, 0 for help and version, 2 for a wrong command or
        a missing dependency of the subcommand, 141 if what is printed is not read to its end.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    return _until_read(lambda: _dispatch(args))


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"isoshard {importlib.metadata.version('isoshard')}")
        return 0
    if args[0] not in COMMANDS:
        print(_no_such_command(args[0]), file=sys.stderr)
        return 2
    return _run(args[0], args[1:])


def _run(command: str, argv: list[str]) -> int:
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root in ("", "isoshard"):
            raise
        extra = EXTRAS.get(command, "demo")
        print(
            f"isoshard {command} needs {root}, which is not installed. "
            f"Fix: {install_command(extra)}; isoshard doctor lists what else is missing.",
            file=sys.stderr,
        )
        return 2
    return module.main(argv)


def _until_read(command: Callable[[], int]) -> int:
    """Run a command; end it quietly if the reader of what it prints ends first, as `head` does."""
    try:
        try:
            status = command()
        except SystemExit:  # argparse has printed the help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # now: at exit Python would print a traceback
        return status
    except BrokenPipeError:
        if not _reader_ended():  # it is about another pipe or socket
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _reader_ended() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: isoshard COMMAND [ARGS]",
            "",
            *lines,
            "",
            "isoshard COMMAND --help shows its options",
        ]
    )


def _no_such_command(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return f"isoshard: no command {word!r}{hint} The commands are {', '.join(COMMANDS)}."
