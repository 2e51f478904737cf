"""The same script under torch_xla 2.9 and under isoshard: equal losses, equal annotations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import environments

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 300
"""Seconds for one script, its compilation included."""

TOLERANCE = 1e-5
"""Of the losses, relative. Ten steps in float32 were 5e-7 apart; the sums run in another order."""


def run(*command):
    """What a script reports; its errors if it does not."""
    variables = {**os.environ, **environments.torch_xla_devices(8)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=SCRIPTS.parent,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["mlp", "cnn", "decoder"])
def both(request):
    """What a script reports under torch_xla, and under isoshard."""
    script = SCRIPTS / f"{request.param}.py"
    theirs = run(environments.python_of("torch-xla"), script)
    return theirs, run(sys.executable, "-m", "isoshard", "run-torch-xla", script)


def test_each_ran_under_its_own(both):
    theirs, ours = (Path(found["torch_xla"]).parts for found in both)
    assert theirs[-3:] == ("site-packages", "torch_xla", "__init__.py")
    assert ours[-3:] == ("torch_bridge", "torch_xla", "__init__.py")


def test_losses_are_equal(both):
    theirs, ours = (found["losses"] for found in both)
    assert len(theirs) == 10
    assert theirs[-1] < 0.96 * theirs[0]  # it learns, so an update that goes wrong shows
    assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=0)


def test_annotations_are_equal(both):
    theirs, ours = (found["annotations"] for found in both)
    assert len(theirs) >= 14
    assert len(set(theirs.values())) >= 5
    assert all(text.startswith("{") for text in theirs.values())
    assert ours == theirs


def test_that_comparison_can_fail():
    assert [1.0, 2.0] != pytest.approx([1.0, 2.0001], rel=TOLERANCE, abs=0)
    with pytest.raises(AssertionError, match="No such file"):
        run(environments.python_of("torch-xla"), "no_script.py")
