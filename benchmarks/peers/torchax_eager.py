"""torchax op by op on the chain; its tensors do not carry torch's autograd through a whole step.

python -m benchmarks.peers.torchax_eager --rounds 20
"""

from __future__ import annotations

import json

import torch
import torchax

from benchmarks import phases
from benchmarks.peers import clock


def main() -> None:
    """Time the chain and print it."""
    rounds = clock.recording_rounds()
    with torchax.default_env():
        x = torch.ones(8, 8, device="jax")
        phases.chain(x, x)
        chains = [phases.chain(x, x) for _ in range(rounds)]
    print(json.dumps({"recording": phases.chain_summary(chains)}))


if __name__ == "__main__":
    main()
