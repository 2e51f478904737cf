"""Which peers there are, and what each finds, in a process of its own with a time limit.

Environments are made by `python -m benchmarks.environments` (`make bench-peers`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import environments
from tools.harness import calls

LIMIT = 240
"""Seconds for one peer and one workload, its compilation included."""


class Peer(NamedTuple):
    """Where a peer runs.

    Attributes:
        function: `module:name`, which measures.
        environment: name of its environment; None for this one.
        variables: of the process.
        ranks: processes that work together; what the first one finds counts.
    """

    function: str
    environment: str | None = None
    variables: Mapping[str, str] = {}
    ranks: int = 1


_XLA = environments.torch_xla_devices(8)
TRAINING = {
    "torchax, jitted": Peer("benchmarks.peers.torchax_step:measure", "torchax"),
    "torch_xla, SPMD": Peer("benchmarks.peers.torch_xla_step:measure", "torch-xla", _XLA),
    "DTensor, gloo": Peer("benchmarks.peers.dtensor:measure", ranks=4),
}
RECORDING = {
    "torchax, eager": Peer("benchmarks.peers.torchax_eager:measure", "torchax"),
    "torch_xla, tracing": Peer("benchmarks.peers.torch_xla_tracing:measure", "torch-xla", _XLA),
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
    return {
        name: {workload: run(peer, workload, scale, steps) for workload in workloads}
        for name, peer in TRAINING.items()
    }


def run(peer: Peer, *arguments: Any, limit: float = LIMIT) -> dict[str, Any]:
    """Run one peer.

    Args:
        peer: which.
        arguments: of its function.
        limit: seconds, after which it and its children are killed.

    Returns:
        What it found; `{"problem": ..}` if it is not installed, took too long or failed.
    """
    python = sys.executable
    if peer.environment is not None:
        python = environments.python_of(peer.environment)
        if not python.exists():
            return {"problem": "not installed (make bench-peers)"}
    each = calls.ranks(peer.ranks) if peer.ranks > 1 else [{}]
    variables = [{**rank, **peer.variables} for rank in each]
    try:
        return calls.together(
            peer.function, *arguments, variables=variables, limit=limit, python=python
        )[0]
    except calls.Failed as error:
        return {"problem": str(error)}
