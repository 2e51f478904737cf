"""The process that compiles: its time, its end, its children, its cache, its errors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoshard.core.runtime.nvidia import install_cuda
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs import compile_worker, targets
from isoshard.planner.programs.compile_worker import compiled
from isoshard.planner.programs.exporting import exported
from isoshard.planner.programs.targets import (
    CompilationError,
    CompilationTimeoutError,
    CompilerMissingError,
    CompileTarget,
)
from tests.planner.programs.sample_steps import layers

HOST = CompileTarget("host")
PACKAGES = {"jax": "0.10.2", "libtpu": "0.0.52", "flatbuffers": "25.12.19"}


@pytest.fixture(scope="module")
def step():
    return exported(layers(topology("v5e:2x2").mesh((2, 2), ("data", "model"))), "cpu")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Let a shell script stand where the compiler's interpreter does."""

    def put(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(targets, "packages_of", lambda python: PACKAGES)
        return str(path)

    return put


def alive(pid):
    """Whether a process runs; one that is a zombie does not."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return said.rpartition(")")[2].split()[0] != "Z"


def gone(pid, within=5.0):
    ends = time.monotonic() + within
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    return not alive(pid)


def zombies():
    """Children of this process that have ended and were not waited for."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):  # slim images have no `ps`
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.append(file.parent.name)
    return found


def test_the_cache_knows_programs_targets_and_flags_apart(step):
    def key(one, target):
        return compile_worker._key(one, target, {"jax": "1"})

    other = exported(layers(topology("v5e:2x2").mesh((4, 1), ("data", "model"))), "cpu")
    flagged = CompileTarget("host", flags=("--xla_backend_optimization_level=0",))
    keys = {key(step, HOST), key(other, HOST), key(step, flagged)}
    keys.add(compile_worker._key(step, HOST, {"jax": "2"}))
    assert len(keys) == 4


def test_time_runs_out_and_no_process_is_left(step, fake, tmp_path):
    python = fake(f"sleep 60 &\necho $! > {tmp_path}/child\necho $$ > {tmp_path}/self\nwait")
    began = time.monotonic()
    with pytest.raises(CompilationTimeoutError, match=r"did not finish in 0\.5 s.*depth='trace'"):
        compiled(step, HOST, timeout=0.5, cache=False, python=python)
    assert time.monotonic() - began < 10
    for name in ("self", "child"):
        assert gone(int((tmp_path / name).read_text()))
    assert zombies() == []
    with pytest.raises(CompilationTimeoutError, match=r"for v5e:2x2 did not .*depth='partition'"):
        compiled(step, CompileTarget("tpu", "v5e:2x2"), timeout=0.1, cache=False, python=python)


def test_an_interrupt_ends_the_compiler(step, fake, tmp_path):
    python = fake(f"echo $$ > {tmp_path}/self\nsleep 60")

    def interrupt(what, seconds):
        if (tmp_path / "self").exists() and (tmp_path / "self").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(step, HOST, cache=False, python=python, progress=interrupt)
    assert gone(int((tmp_path / "self").read_text()))
    assert zombies() == []


def test_the_compiler_ends_with_the_process_that_asked(tmp_path):
    """The real worker, whose parent is killed while it waits for a program."""
    folder = tmp_path / "work"
    folder.mkdir()
    os.mkfifo(folder / "request.json")  # reading it blocks
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"p = subprocess.Popen([sys.executable, {str(compile_worker.WORKER)!r}, "
            f"{str(folder)!r}], stdin=subprocess.PIPE, start_new_session=True)\n"
            "print(p.pid, flush=True)\ntime.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(worker)
    assert not folder.exists()


def test_of_a_traceback_the_error_holds_what_was_raised(step, fake):
    said = (
        'File "a.py", line 3\njax.errors.JaxRuntimeError: INTERNAL: no tiles for %dot.1\n'
        + "\tmap: (d0)\n" * 20
        + "Suspected Python Code Location:\n  worker.py:103"
    )
    python = fake(f"cat >&2 <<'END'\n{said}\nEND\nexit 1")
    with pytest.raises(CompilationError) as caught:
        compiled(step, HOST, cache=False, python=python)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the compiler for the host failed:"
    assert lines[1] == "jax.errors.JaxRuntimeError: INTERNAL: no tiles for %dot.1"
    assert len(lines) == 13 and "Suspected" not in str(caught.value)
    with pytest.raises(CompilationError, match=r"ended by SIGKILL \(out of memory\?\)"):
        compiled(step, HOST, cache=False, python=fake("kill -9 $$"))


def test_a_program_that_the_compiler_refuses(step):
    wrong = CompileTarget("host", flags=("--xla_no_such_flag=1",))
    with pytest.raises(CompilationError, match="xla_no_such_flag"):
        compiled(step, wrong, cache=False)


def test_a_missing_compiler_comes_with_the_line_that_installs_it(step, monkeypatch):
    found = {"jax": "0.10.2", "jaxlib": "0.10.2"}
    monkeypatch.setattr(targets, "packages_of", lambda python: found)
    with pytest.raises(CompilerMissingError, match=r"libtpu is not installed.*pip install libtpu"):
        compiled(step, CompileTarget("tpu", "v5e:2x2"))
    with pytest.raises(CompilerMissingError, match=re.escape(install_cuda("0.10.2"))):
        compiled(step, CompileTarget("cuda", "1x1x4"))


def test_one_process_at_a_time_uses_libtpu(step, fake, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_worker, "LOCK", tmp_path / "lock")
    python = fake("exit 3")
    told = []
    target = CompileTarget("tpu", "v5e:2x2")
    with compile_worker._exclusive(target, None, lambda *said: None):
        with pytest.raises(CompilationTimeoutError, match="another process has compiled by libtpu"):
            compiled(
                step,
                target,
                timeout=0.3,
                cache=False,
                python=python,
                progress=lambda what, seconds: told.append(what),
            )
    assert set(told) == {"waiting for another process that compiles by libtpu"}
    with pytest.raises(CompilationError):  # now it is free
        compiled(step, target, cache=False, python=python)
