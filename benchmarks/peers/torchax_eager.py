"""torchax op by op on the chain; its tensors do not carry torch's autograd through a whole step."""

from __future__ import annotations

import torch
import torchax

from benchmarks import phases


def measure(rounds: int) -> dict[str, float]:
    """Time the chain."""
    with torchax.default_env():
        x = torch.ones(8, 8, device="jax")
        phases.chain(x, x)
        chains = [phases.chain(x, x) for _ in range(rounds)]
    return phases.chain_summary(chains)
