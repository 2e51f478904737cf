"""`transformers.Trainer` on the device and on a mesh: as on the CPU, and resumed as one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
PROGRAM = Path(__file__).with_name("trainer_program.py")


def run(tmp_path: Path, device: str, *words: str) -> dict:
    """What the program reports, in a process of its own, with its device by the environment."""
    variables = {**os.environ, "ACCELERATE_TORCH_DEVICE": device}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    return run(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.mark.parametrize("layout", ["none", "tensor-parallel", "fsdp"])
def test_losses_checkpoints_and_resuming(tmp_path, on_the_cpu, layout):
    found = run(tmp_path, "jax", layout)
    assert found["device"] == "jax:0" and on_the_cpu["device"] == "cpu"
    assert found["split"] == (layout != "none")
    assert len(found["losses"]) == len(on_the_cpu["losses"]) == 8
    assert found["losses"] == pytest.approx(on_the_cpu["losses"], rel=2e-4)
    assert found["evaluated"] == pytest.approx(on_the_cpu["evaluated"], rel=2e-4)
    assert found["resumed"] == pytest.approx(found["losses"][-len(found["resumed"]) :], rel=1e-6)
    assert found["reloaded"] == pytest.approx(found["evaluated"], rel=2e-4)
