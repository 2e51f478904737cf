"""Start peers, each in a process of its own with a time limit, and read what they print.

Environments are made by `python -m benchmarks.environments` (`make bench-peers`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environments

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240
"""Seconds for one peer and one workload, its compilation included."""


class Peer(NamedTuple):
    """Where a peer runs.

    Attributes:
        module: the command, `python -m ..`.
        environment: name of its environment; None for this one.
        variables: of the process.
    """

    module: str
    environment: str | None = None
    variables: Mapping[str, str] = {}


_XLA = environments.torch_xla_devices(8)
TRAINING = {
    "torchax, jitted": Peer("benchmarks.peers.torchax_step", "torchax"),
    "torch_xla, SPMD": Peer("benchmarks.peers.torch_xla_step", "torch-xla", _XLA),
    "DTensor, gloo": Peer("benchmarks.peers.dtensor"),
}
RECORDING = {
    "torchax, eager": Peer("benchmarks.peers.torchax_eager", "torchax"),
    "torch_xla, tracing": Peer("benchmarks.peers.torch_xla_tracing", "torch-xla", _XLA),
}


def training(workloads: Sequence[str], scale: str, *, steps: int) -> dict[str, dict[str, Any]]:
    """What each peer measures on each workload.

    Args:
        workloads: names of problems.
        scale: one of `sizes.SCALES`.
        steps: of a timed round.

    Returns:
        By peer and workload its numbers, or `{"problem": why there are none}`.
    """
    options = ("--scale", scale, "--steps", str(steps))
    return {
        name: {workload: run(peer, workload, *options, key=workload) for workload in workloads}
        for name, peer in TRAINING.items()
    }


def run(peer: Peer, *arguments: str, key: str, limit: float = LIMIT) -> dict[str, Any]:
    """Run one peer.

    Args:
        peer: which.
        arguments: for its command.
        key: of the finding wanted from the JSON objects that it prints.
        limit: seconds, after which it and its children are killed.

    Returns:
        What it found; `{"problem": ..}` if it is not installed, took too long or failed.
    """
    python = sys.executable
    if peer.environment is not None:
        python = str(environments.python_of(peer.environment))
        if not Path(python).exists():
            return {"problem": "not installed (make bench-peers)"}
    process = subprocess.Popen(
        [python, "-m", peer.module, *arguments],
        cwd=ROOT,
        env=_environment(peer),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its children end with it
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"problem": f"took more than {limit:.0f} s"}
    for line in out.splitlines():
        if line.startswith("{") and key in (found := json.loads(line)):
            return found[key]
    last = ([line for line in err.splitlines() if line.strip()] or ["no output"])[-1]
    return {"problem": f"ended with status {process.returncode}: {last.strip()[:200]}"}


def _environment(peer: Peer) -> dict[str, str]:
    """The variables of this process, without those by which JAX was told its devices here."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS",)}
    return {**kept, **peer.variables, "PYTHONPATH": str(ROOT)}
