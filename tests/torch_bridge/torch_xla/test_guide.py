"""torch_xla's example programs and the blocks of its SPMD guide, under `run-torch-xla`.

Their imports are unchanged. `guide/_models.py` has the models of the larger ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import python_path

GUIDE = Path(__file__).parent / "guide"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`isoshard run-torch-xla WORDS` on eight virtual CPU devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    kept.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as in conftest.py
    kept["PYTHONFAULTHANDLER"] = "1"  # a crash says where
    return subprocess.run(
        [sys.executable, "-m", "isoshard", "run-torch-xla", *words],
        env=kept | {"CPU_NUM_DEVICES": "8", "PJRT_DEVICE": "CPU"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("script", sorted(GUIDE.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_the_guides_example_runs(script):
    done = run(str(script))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_example_that_is_wrong_fails(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch_xla.runtime as xr\nassert xr.global_runtime_device_count() == 3\n"
    )
    done = run(str(script))
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_arguments_and_modules_reach_the_script(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    body = "import sys, torch_xla\nprint(sys.argv[1:], __name__, torch_xla.__name__)\n"
    (tmp_path / "package" / "train.py").write_text(body)
    done = run("-m", "package.train", "--steps", "3", PYTHONPATH=python_path(tmp_path))
    assert done.stdout == "['--steps', '3'] __main__ isoshard.torch_bridge.torch_xla\n", done.stderr


def test_wrong_command_lines():
    done = run("nowhere.py")
    assert (done.returncode, done.stderr) == (
        2,
        "isoshard run-torch-xla: there is no file 'nowhere.py'\n",
    )
    assert run().returncode == 2
    assert "no script in ['-m']" in run("-m").stderr
    assert "usage: isoshard run-torch-xla" in run("--help").stdout
