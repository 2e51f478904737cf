"""`import isoshard.torch_bridge` changes nothing of what plain CPU torch does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import plain_cpu

SCRIPT = Path(plain_cpu.__file__)


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results():
    return run(), run("--import")


@pytest.mark.parametrize("name", plain_cpu.IDIOMS)
def test_idiom(results, name):
    without, with_it = results
    assert with_it[name] == without[name]


def test_most_idioms_work(results):
    said = {name: text.partition(":")[0] for name, (text, _) in results[0].items()}
    refused = {name for name, kind in said.items() if kind.endswith("Error")}
    assert refused == {"pinned_tensor"}
