"""docs/command_line.md shows every command's help as it is, and its examples run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from isoshard.cli import main
from tests import fresh
from tests.cli.command_page import EVERY, PAGE, examples, files, help_of, shown, written

TEXT = PAGE.read_text()
SHOWN = shown(TEXT)


def test_help_is_shown_as_it_is_printed():
    assert set(SHOWN) == set(EVERY) and TEXT.count("```text\nusage: ") == len(EVERY)
    for words in EVERY:  # where lines break is Python's
        assert SHOWN[words].split() == help_of(words).split(), "python -m tests.cli.command_page"


def test_every_command_has_an_example():
    lines = "".join(examples(TEXT)).splitlines()
    for words in EVERY:
        command = " ".join(("isoshard", *words))
        if words != ("onnx",):  # its subcommands have
            assert any(command in line for line in lines), command


ELSEWHERE = {
    "isoshard doctor",
    "isoshard doctor --json --devices 4 > doctor.json",
    "isoshard demo",
    "isoshard demo --full --steps 3 --mesh 2x2 --out demo",
}
"""What test_doctor.py and test_demo.py run."""
HERE = ("isoshard plan", "isoshard onnx check", "isoshard onnx show")
"""What runs in this process, after the rest."""
FORKED = (
    *("isoshard doctor --cluster", "isoshard onnx run", "python make_model.py"),
    "isoshard --version",
    "CPU_NUM_DEVICES=8 isoshard run-torch-xla",
)
"""What runs in a fork, after what runs in a shell."""


def is_forked(line):
    return line == "isoshard" or line.startswith(FORKED)


COMMAND = "import sys; from isoshard.cli import main; sys.exit(main(sys.argv[1:]))"
EXAMPLES = [code for code in examples(TEXT) if not set(code.splitlines()) <= ELSEWHERE]


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split("\n")[0][:40])
def test_an_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in files(TEXT).items():
        (tmp_path / name).write_text(text)
    lines = [line for line in code.splitlines() if line not in ELSEWHERE]
    if script := "\n".join(
        line for line in lines if not (is_forked(line) or line.startswith(HERE))
    ):
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            env={**environment, "PATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        assert done.stdout or "config.json" in script
    for line in lines:
        if is_forked(line):
            words = shlex.split(line)
            variables = dict(word.split("=") for word in words if "=" in word)
            first, *words = words[len(variables) :]
            program = COMMAND if first == "isoshard" else tmp_path / words.pop(0)
            done = fresh.run(program, words, cwd=tmp_path, env=variables)
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    for line in lines:
        if line.startswith(HERE):
            assert main(shlex.split(line)[1:]) == 0, line
            assert capsys.readouterr().out


def test_help_that_is_not_current_is_replaced():
    words = ("doctor",)
    page = "```sh\nisoshard doctor\n```\n\n```text\nusage: isoshard doctor [--gone]\n```\n\nmore\n"
    now = written(page)
    assert shown(now) == {words: help_of(words)} and "--gone" not in now
    assert now.endswith("\n```\n\nmore\n")
