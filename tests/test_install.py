"""What `make` says while it installs, and where it cannot."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "install.sh"
NOBODY_LISTENS = "http://127.0.0.1:9/simple"


def install(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder."""
    return subprocess.run(
        ["sh", str(SCRIPT), *words],
        cwd=folder,
        env={**os.environ, "NEEDED_MB": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def program(path: Path, text: str) -> str:
    """Write a shell program to stand for a Python."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_python_missing(tmp_path):
    done = install("environment", "python9.9", ".venv", folder=tmp_path)
    assert done.returncode == 1
    assert "there is no Python at PYTHON=python9.9" in done.stderr
    assert "Install Python >= 3.11" in done.stderr


def test_python_too_old(tmp_path):
    code = 'case "$*" in --version) echo Python 3.9.2;; "-c ") ;; *) exit 1;; esac'
    old = program(tmp_path / "python3.9", code)
    done = install("environment", old, ".venv", folder=tmp_path)
    assert done.returncode == 1
    assert f"Python >= 3.11 is needed, but PYTHON={old} is: Python 3.9.2." in done.stderr
    assert "make PYTHON=python3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_no_venv_module_leaves_nothing_behind(tmp_path):
    made = "mkdir .venv; echo no ensurepip >&2; exit 1"
    code = f'case "$*" in --version) echo Python 3.11.2;; -m*) {made};; esac'
    python = program(tmp_path / "python3", code)
    done = install("environment", python, ".venv", folder=tmp_path)
    assert done.returncode == 1
    assert "no ensurepip" in done.stderr and "apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    "words", [("environment", sys.executable, ".venv"), ("packages", sys.executable, "it", "it")]
)
def test_too_little_space_is_said_before_anything_is_fetched(words, tmp_path):
    done = install(*words, folder=tmp_path, NEEDED_MB="99999999")
    assert done.returncode == 1
    assert re.search(r"\d+ MB are free at \., 99999999 MB are needed", done.stderr)
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_the_disk_runs_full(tmp_path):
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    python = program(tmp_path / "python", f"echo '{said}'; exit 1")
    done = install("packages", python, "it", "it", folder=tmp_path)
    assert done.returncode == 1
    assert "Errno 28" in done.stderr and "the disk is full" in done.stderr


def test_no_network(tmp_path):
    """pip itself, with an index that refuses connections."""
    done = install(
        *("packages", sys.executable, "a package", "--retries", "1", "--isolated"),
        *("--index-url", NOBODY_LISTENS, "--target", "here", "isoshard-of-nowhere"),
        folder=tmp_path,
    )
    assert done.returncode == 1
    assert done.stdout == "installing a package ..\n"
    assert "no package index can be reached" in done.stderr
    assert "PIP_FIND_LINKS" in done.stderr


def test_another_reason_is_pips_own(tmp_path):
    done = install(
        *("packages", sys.executable, "a package", "--no-index", "isoshard-of-nowhere"),
        folder=tmp_path,
    )
    assert done.returncode == 1
    assert "No matching distribution found for isoshard-of-nowhere" in done.stderr
    assert "pip cannot install a package" in done.stderr


@pytest.mark.parametrize("network", [True, False])
def test_each_step_is_a_line(network, tmp_path):
    make = 'mkdir -p .venv/bin; cp "$0" .venv/bin/python'
    upgrade = "exit 0" if network else "echo no network >&2; exit 1"
    code = f"""case "$*" in --version) echo Python 3.11.2;; *upgrade*) {upgrade};;
        "-m venv"*) {make};;
        *"pip --version") echo pip 23.2.1 from here;; esac"""
    python = program(tmp_path / "python3", code)
    made = install("environment", python, ".venv", folder=tmp_path)
    assert made.returncode == 0 and (tmp_path / ".venv").is_dir(), made.stderr
    stays = "" if network else "pip stays at 23.2.1: a newer one cannot be fetched\n"
    assert made.stdout == f"making .venv with Python 3.11.2 ..\n{stays}"
    done = install("packages", python, "nothing new", "pip", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"installing nothing new \.\.\ninstalled in \d+ s\n", done.stdout)


def test_the_makefile_installs_by_the_script_alone():
    text = (ROOT / "Makefile").read_text()
    made_by_hand = [
        line
        for line in text.splitlines()
        if line.startswith("\t") and ("pip install" in line or "-m venv" in line)
    ]
    assert made_by_hand == []
    assert text.count("$(INSTALL)") > 5
