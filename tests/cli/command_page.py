"""docs/command_line.md: the help that it shows, its files and its examples.

python -m tests.cli.command_page        # writes the help as it is now
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from isoshard.cli import main
from isoshard.cli.dispatch import COMMANDS
from tests.doc_blocks import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"
SUBCOMMANDS = {"onnx": ("check", "show", "run")}
EVERY = [
    (),
    *((name,) for name in COMMANDS),
    *((name, one) for name, ones in SUBCOMMANDS.items() for one in ones),
]
"""The words of every command that has help."""

_HELP = re.compile(r"^```text\nusage: (?P<usage>(?:(?!```).*\n)*)```$", re.M)
_SHELL = re.compile(r"^```sh\n(?P<code>(?:(?!```).*\n)*)```$", re.M)


def help_of(words: tuple[str, ...]) -> str:
    """What `isoshard WORDS --help` prints, 80 columns wide.

    Args:
        words: of the command.
    """
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
    return printed.getvalue().rstrip()


def shown(page: str) -> dict[tuple[str, ...], str]:
    """The help that a page shows, by the words of its command.

    Args:
        page: its text.
    """
    found = (match["usage"] for match in _HELP.finditer(page))
    return {_words(usage): f"usage: {usage}".rstrip() for usage in found}


def _words(usage: str) -> tuple[str, ...]:
    said = usage.split()[1:]
    return tuple(word for word in said[:2] if word in COMMANDS or word in SUBCOMMANDS["onnx"])


def written(page: str) -> str:
    """The page with the help as it is now.

    Args:
        page: its text, in which a block that starts with the usage of a command stands for it.
    """
    return _HELP.sub(lambda match: f"```text\n{help_of(_words(match['usage']))}\n```", page)


def files(page: str) -> dict[str, str]:
    """The Python files of a page, whose names are their first lines.

    Args:
        page: its text.
    """
    found = (block.code.partition("\n") for block in blocks(page))
    return {name.removeprefix("# "): code for name, _, code in found}


def examples(page: str) -> list[str]:
    """The shell blocks of a page.

    Args:
        page: its text.
    """
    return [match["code"] for match in _SHELL.finditer(page)]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
