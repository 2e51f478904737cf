"""Hostile ONNX files: 150 here, more by `python -m tests.fuzz.onnx_files`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isoshard.onnx_bridge import ModelError, validate
from tests.fuzz import onnx_files
from tests.fuzz.onnx_seeds import seeds
from tests.python_path import python_path


def test_every_file_is_read_or_refused():
    assert onnx_files.fuzz(files=150, seed=3) == []


def test_the_seeds_are_sound(tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(256))
    for number, model in enumerate(seeds()):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(model.SerializeToString())
        assert [one for one in validate(path) if one.severity == "error"] == []


def test_values_without_measure_and_unknown_operators_are_refused():
    script = Path(__file__).with_name("giants.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": python_path(".")},
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 11
    assert [line for line in said if ": ModelError: " not in line] == []
    assert "more than 64.0 GiB" in said[0]
    assert "Nothing-20" in said[-1]
    assert "mine.Other-1" in said[-1]


def dies_at_seven(folder, out):
    def opened(seed, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    return opened


class TestFaultsAreFound:
    @pytest.fixture
    def meet(self, monkeypatch, tmp_path):
        def fault(error=None, read=b""):
            def opened(folder, data):
                if error is not None:
                    raise error
                return read

            monkeypatch.setattr(onnx_files, "_open", opened)
            return onnx_files._fault(tmp_path, b"")

        return fault

    def test_an_undocumented_exception(self, meet):
        assert "KeyError at " in meet(KeyError("name"))
        assert "MemoryError" in meet(MemoryError())
        assert meet(ModelError("refused")) == ""

    def test_bytes_from_outside(self, meet):
        assert meet(read=b".." + onnx_files.SECRET) == "it holds bytes from outside the folder"
        assert meet(read=b"..") == ""

    def test_a_process_that_dies(self, monkeypatch):
        monkeypatch.setattr(onnx_files, "start", dies_at_seven)
        assert onnx_files.fuzz(files=9) == ["7: the process ended (-11)"]

    def test_memory_that_runs_out(self, monkeypatch, tmp_path):
        limited = tmp_path / "limited.py"
        limited.write_text(
            "import isoshard.onnx_bridge\n"
            "from tests.fuzz import onnx_files\n"
            "onnx_files.EXTRA = 1 << 28\n"
            "onnx_files._limit_memory()\n"
            "onnx_files._open = lambda folder, data: bytes(1 << 30)\n"
            "print(onnx_files._fault(None, b''))\n"
        )
        done = subprocess.run(
            [sys.executable, str(limited)], capture_output=True, text=True, timeout=120,
            env={"PYTHONPATH": python_path("."), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert "MemoryError" in done.stdout, done.stderr
