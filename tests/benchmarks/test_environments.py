"""Each environment's tests run with its interpreter, its variables, and stop at a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import environments


@pytest.fixture
def started(monkeypatch):
    """What is run instead of pytest: pairs of command and variables; the status is `started[0]`."""
    found = []

    def run(command, *, cwd, env, check):
        found.append(([str(word) for word in command], env))
        return subprocess.CompletedProcess(command, 0 if len(found) < 3 else 7)

    monkeypatch.setattr(environments, "versions", lambda name: "torch, jax")
    monkeypatch.setattr(environments.subprocess, "run", run)
    return found


def test_torch_xla_is_tested_with_one_device_with_eight_and_from_outside(started):
    assert environments.test("torch-xla", ["-x"]) == 7
    inside = str(environments.python_of("torch-xla"))
    assert [command[0] for command, _ in started] == [inside, inside, sys.executable]
    assert [command[-2:] for command, _ in started] == [
        ["tests/with_torch_xla/single", "-x"],
        ["tests/with_torch_xla/spmd", "-x"],
        ["tests/with_torch_xla/test_scripts.py", "-x"],
    ]
    assert [env.get("CPU_NUM_DEVICES") for _, env in started[:2]] == ["1", "8"]


def test_the_first_failure_ends_it(started):
    started.extend([None, None])
    assert environments.test("torch-xla", []) == 7
    assert len(started) == 3


def test_every_folder_of_those_tests_is_there():
    for environment in environments.ENVIRONMENTS.values():
        for tests in environment.tests:
            folders = [word for word in tests.arguments if word.startswith("tests/")]
            assert folders
            assert all((environments.ROOT / folder).exists() for folder in folders)


def test_an_environment_without_tests_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["environments", "torchax", "--test"])
    with pytest.raises(SystemExit):
        environments.main()
    assert "there are no tests for torchax" in capsys.readouterr().err
