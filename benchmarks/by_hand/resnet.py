"""ResNet-50 by hand, channels last as JAX users write it.

BatchNorm takes mean and variance over the whole batch, however it is split over devices; the
compiler adds the all-reduce.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.by_hand import optimizers
from benchmarks.by_hand.layers import Params, conv, cross_entropy, linear
from benchmarks.models import resnet as torch_resnet

EPSILON, KEPT = 1e-5, 0.9  # of BatchNorm; the share of the old running statistics
OPTIMIZER = optimizers.sgd(
    torch_resnet.LEARNING_RATE,
    momentum=torch_resnet.MOMENTUM,
    weight_decay=torch_resnet.WEIGHT_DECAY,
)


class Norms:
    """Batch normalisation in training mode; gathers the new running statistics."""

    def __init__(self, params: Params, buffers: Params):
        """Begin with the statistics in `buffers`."""
        self.params = params
        self.old = buffers
        self.new: Params = {}

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """Normalise `(batch, height, width, channels)` over all but the last axis."""
        mean = x.mean((0, 1, 2))
        var = (x * x).mean((0, 1, 2)) - mean * mean  # as Flax: one pass, one all-reduce
        count = x.size // x.shape[-1]
        self._keep(f"{name}.running_mean", mean)
        self._keep(f"{name}.running_var", var * (count / (count - 1)))
        scale = jax.lax.rsqrt(var + EPSILON) * self.params[f"{name}.weight"]
        return (x - mean) * scale + self.params[f"{name}.bias"]

    def _keep(self, name: str, now: jax.Array) -> None:
        self.new[name] = KEPT * self.old[name] + (1 - KEPT) * jax.lax.stop_gradient(now)


def loss(params: Params, buffers: Params, images: jax.Array, labels: jax.Array):
    """Mean cross entropy, and the new running statistics."""
    norms = Norms(params, buffers)
    x = conv(images, params["conv.weight"], 2, 3)
    x = jax.nn.relu(norms("bn", x))
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    for number, count in enumerate(torch_resnet.STAGES):
        for block in range(count):
            stride = 2 if number and not block else 1
            x = _bottleneck(params, norms, f"stages.{number}.{block}", x, stride)
    logits = linear(params, "head", x.mean((1, 2)))
    return cross_entropy(logits, labels), norms.new


def _bottleneck(params: Params, norms: Norms, name: str, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(norms(f"{name}.bn1", conv(x, params[f"{name}.conv1.weight"])))
    y = jax.nn.relu(norms(f"{name}.bn2", conv(y, params[f"{name}.conv2.weight"], stride, 1)))
    y = norms(f"{name}.bn3", conv(y, params[f"{name}.conv3.weight"]))
    if f"{name}.shortcut.0.weight" in params:
        x = norms(f"{name}.shortcut.1", conv(x, params[f"{name}.shortcut.0.weight"], stride))
    return jax.nn.relu(y + x)
