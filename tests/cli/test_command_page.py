"""docs/command_line.md shows every command's help as it is, and its examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_page import EVERY, PAGE, examples, files, help_of, shown, written

TEXT = PAGE.read_text()
SHOWN = shown(TEXT)


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_is_shown_as_it_is_printed(words):
    assert words in SHOWN, f"docs/command_line.md has no help of isoshard {' '.join(words)}"
    # Where lines break is Python's.
    printed = help_of(words).split()
    assert SHOWN[words].split() == printed, "python -m tests.cli.command_page writes it"


def test_no_other_command_is_shown_and_none_twice():
    assert set(SHOWN) == set(EVERY) and TEXT.count("```text\nusage: ") == len(EVERY)


def test_every_command_has_an_example():
    lines = "".join(examples(TEXT)).splitlines()
    for words in EVERY:
        command = " ".join(("isoshard", *words))
        if words != ("onnx",):  # its subcommands have
            assert any(command in line for line in lines), command


@pytest.mark.parametrize("code", examples(TEXT), ids=lambda code: code.split("\n")[0][:40])
def test_an_example_runs(code, tmp_path):
    for name, text in files(TEXT).items():
        (tmp_path / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", code],
        cwd=tmp_path,
        env={**environment, "PATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert done.stdout


def test_help_that_is_not_current_is_replaced():
    words = ("doctor",)
    page = "```sh\nisoshard doctor\n```\n\n```text\nusage: isoshard doctor [--gone]\n```\n\nmore\n"
    now = written(page)
    assert shown(now) == {words: help_of(words)} and "--gone" not in now
    assert now.endswith("\n```\n\nmore\n")
