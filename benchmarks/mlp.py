"""The MLP: 512-2048-2048-512, batch 128, mean squared error, SGD.

Small enough that a step takes about 10 ms, so what the framework adds to each step shows.

>>> import torch
>>> WORKLOAD.torch_loss(WORKLOAD.torch_module(), *map(torch.from_numpy, WORKLOAD.batch(0))).shape
torch.Size([])
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn import functional as F

from benchmarks import optimizers
from benchmarks.workload import Params, Workload

BATCH = 128
LEARNING_RATE = 0.05


class MLP(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int = 512, hidden: int = 2048):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, width)` to the same shape."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def torch_loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(x), y)


def jax_loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    def linear(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    x = jax.nn.relu(linear("fc1", x))
    x = jax.nn.relu(linear("fc2", x))
    return jnp.mean((linear("fc3", x) - y) ** 2)


def batch(number: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(number)
    x = rng.standard_normal((BATCH, 512), np.float32)
    return x, np.roll(x, 1, axis=1)


_init, _update = optimizers.sgd(LEARNING_RATE)
WORKLOAD = Workload(
    name="mlp",
    build=MLP,
    torch_loss=torch_loss,
    torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    max_norm=None,
    jax_loss=jax_loss,
    jax_init=_init,
    jax_update=_update,
    specs=(
        ("fc[13].weight", P("model", None)),  # outputs split
        ("fc[13].bias", P("model")),
        ("fc2.weight", P(None, "model")),  # inputs split
    ),
    batch=batch,
)
