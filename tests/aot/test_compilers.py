"""Compilers in processes: what they answer, and what happens where they do not."""

import os
import sys
from pathlib import Path

import pytest

from isoshard.planner.programs.targets import CompileTarget
from tests.aot.compilers import Compiler

FAKE = Path(__file__).with_name("fake_compiler.py")


def _compiler(machine="fake", limit=60.0):
    return Compiler(CompileTarget(machine), Path(sys.executable), limit=limit, script=FAKE)


@pytest.fixture
def request_of(tmp_path):
    def made(what):
        path = tmp_path / what
        path.write_text(what)
        return {"path": str(path)}

    return made


def test_programs_pass_and_are_refused_by_one_process(request_of):
    with _compiler() as compiler:
        assert compiler.compile(request_of("pass")) == ("pass", "", 0.5)
        first = compiler._process
        assert compiler.compile(request_of("refuse")) == ("refused", "Refused: no", 0.5)
        assert compiler.compile(request_of("lines")).status == "pass"
        assert compiler._process is first
        assert compiler.versions == {"fake": "1.0"}


def test_a_process_that_ends_is_replaced(request_of):
    with _compiler() as compiler:
        status, reason, _ = compiler.compile(request_of("crash"))
        assert status == "crash"
        assert "status -6: the program is too much" in reason
        assert compiler.compile(request_of("pass")).status == "pass"


def test_a_process_that_hangs_is_ended(request_of):
    with _compiler(limit=1.0) as compiler:
        assert compiler.compile(request_of("pass")).status == "pass"
        process = compiler._process
        assert process is not None
        status, reason, _ = compiler.compile(request_of("hang"))
        assert (status, reason) == ("timeout", "not done after 1 s")
        assert process.returncode is not None
        assert compiler.compile(request_of("pass")).status == "pass"


def test_no_process_is_left(request_of):
    with _compiler() as compiler:
        compiler.compile(request_of("pass"))
        process = compiler._process
        assert process is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_compiler_that_cannot_start_is_named(request_of):
    with (
        _compiler("nothing") as compiler,
        pytest.raises(RuntimeError, match=r"compiler for nothing cannot start .* no such compiler"),
    ):
        compiler.compile(request_of("pass"))


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    target = CompileTarget("fake")
    with (
        Compiler(target, tmp_path / "python", script=FAKE) as compiler,
        pytest.raises(
            RuntimeError, match=r"no .*python: make it by .*environments aot .* --python"
        ),
    ):
        compiler.compile({"path": ""})
