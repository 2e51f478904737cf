"""torch_xla's example programs and the blocks of its SPMD guide, under `run-torch-xla`.

Their imports are unchanged. `guide/_models.py` has the models of the larger ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isoshard.cli import main
from tests.python_path import python_path

GUIDE = Path(__file__).parent / "guide"


@pytest.mark.parametrize("script", sorted(GUIDE.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_the_guides_example_runs(script, processes):
    done = processes.script(script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_example_that_is_wrong_fails(tmp_path, processes):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch_xla.runtime as xr\nassert xr.global_runtime_device_count() == 3\n"
    )
    done = processes.script(script)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_arguments_and_modules_reach_the_script(tmp_path, processes):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    body = "import sys, torch_xla\nprint(sys.argv[1:], __name__, torch_xla.__name__)\n"
    (tmp_path / "package" / "train.py").write_text(body)
    words, path = ("run-torch-xla", "-m", "package.train", "--steps", "3"), python_path(tmp_path)
    done = processes.run(*words, PYTHONPATH=path)
    assert done.stdout == "['--steps', '3'] __main__ isoshard.torch_xla_bridge.torch_xla\n", (
        done.stderr
    )


def test_wrong_command_lines(capsys):
    assert main(["run-torch-xla", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "isoshard run-torch-xla: there is no file 'nowhere.py'\n"
    assert main(["run-torch-xla"]) == main(["run-torch-xla", "-m"]) == 2
    assert "no script in ['-m']" in capsys.readouterr().err
    assert main(["run-torch-xla", "--help"]) == 0
    assert "usage: isoshard run-torch-xla" in capsys.readouterr().out
