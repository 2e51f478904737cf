"""torchax, as a function: `torchax.train.make_train_step` with optax, jitted, on the (2, 4) mesh.

Functional, as torchax wants it: `loss.backward()` does not work through `nn.Linear` there, and
BatchNorm's running statistics stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import torch
import torchax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torchax import interop
from torchax.train import make_train_step

from benchmarks.models import gpt2, mlp, resnet, sizes, vit
from benchmarks.models.problem import MESH, Problem
from benchmarks.peers import clock


def measure(name: str, scale: str, steps: int) -> dict[str, Any]:
    """Train one problem."""
    jax.config.update("jax_num_cpu_devices", math.prod(MESH.values()))
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    problem = sizes.problem(name, scale)
    module = problem.module()
    environment = torchax.default_env()

    def place(array: np.ndarray, spec: tuple[Any, ...]) -> Any:
        return interop.torch_view(jax.device_put(array, NamedSharding(mesh, P(*spec))))

    weights = {
        name: place(parameter.detach().numpy(), problem.spec(name))
        for name, parameter in module.named_parameters()
    }
    buffers = {name: place(buffer.numpy(), ()) for name, buffer in module.named_buffers()}
    optimizer = optax_of(problem)
    state = interop.call_jax(optimizer.init, weights)

    def forward(weights: Any, buffers: Any, batch: Any) -> torch.Tensor:
        return torch.func.functional_call(module, {**weights, **buffers}, batch)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return problem.loss(lambda _: output, None, targets)

    step = interop.jax_jit(
        make_train_step(forward, loss, optimizer), kwargs_for_jax_jit={"donate_argnums": (0, 2)}
    )
    carried = [weights, state]

    def run(inputs: Any, targets: Any) -> Any:
        with environment:
            loss, carried[0], carried[1] = step(carried[0], buffers, carried[1], (inputs,), targets)
        return loss

    def load(number: int) -> tuple[Any, ...]:
        return tuple(
            place(part.astype(np.int32) if part.dtype == np.int64 else part, problem.batch_spec)
            for part in problem.batch(number)
        )

    result = clock.timed(run, load, steps=steps, read=lambda loss: float(interop.jax_view(loss)))
    return result | {"note": f"torchax {torchax.__version__}, jitted function"}


def optax_of(problem: Problem) -> optax.GradientTransformation:
    """The optimizer of a problem, from optax."""
    optimizers = {
        "mlp": lambda: optax.sgd(mlp.LEARNING_RATE),
        "gpt2": lambda: optax.chain(
            optax.clip_by_global_norm(gpt2.MAX_NORM),
            optax.adamw(gpt2.LEARNING_RATE, weight_decay=0.01),
        ),
        "resnet50": lambda: optax.chain(
            optax.add_decayed_weights(resnet.WEIGHT_DECAY),
            optax.sgd(resnet.LEARNING_RATE, momentum=resnet.MOMENTUM),
        ),
        "vit": lambda: optax.adamw(vit.LEARNING_RATE, weight_decay=0.01),
    }
    return optimizers[problem.name]()
