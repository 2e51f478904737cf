"""What a step reads and does not hold: the mode of a module, and names of torch and Python.

Each changes after two calls of a compiled step; the same calls of the step as it is written tell
what is right. A dropout of rate 1 gives zeros while it trains, so no draw is compared.
"""

import math

import jax
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch.nn import functional

import isoshard as iso
from isoshard.torch_bridge.interop.assume_pure import PureModule

from .programs import SIZE, WAYS

MODULES = {
    "torch.nn.Dropout": lambda: torch.nn.Dropout(1.0),
    "torch.nn.BatchNorm1d": lambda: torch.nn.BatchNorm1d(SIZE, device="jax"),
    "nnx.Dropout": lambda: iso.torch_module(nnx.Dropout(1.0, rngs=nnx.Rngs(0))),
    "nnx.BatchNorm": lambda: iso.torch_module(nnx.BatchNorm(SIZE, rngs=nnx.Rngs(0))),
    "linen.Dropout": lambda: iso.torch_module(linen.Dropout(1.0), {}, rngs=jax.random.key(0)),
    "in a Sequential": lambda: torch.nn.Sequential(
        torch.nn.Tanh(), iso.torch_module(nnx.Dropout(1.0, rngs=nnx.Rngs(0)))
    ),
    "PureModule": lambda: PureModule(torch.nn.Dropout(1.0)),
}
NAMES = {
    "F.silu": (functional, "silu", lambda value: functional.silu(value)),
    "F.gelu": (functional, "gelu", lambda value: functional.gelu(value)),
    "torch.sin": (torch, "sin", lambda value: torch.sin(value)),
    "torch.special.erf": (torch.special, "erf", lambda value: torch.special.erf(value)),
    "Tensor.relu": (torch.Tensor, "relu", lambda value: value.relu()),
    "nn.ReLU.forward": (torch.nn.ReLU, "forward", torch.nn.ReLU()),
    "math.sqrt": (math, "sqrt", lambda value: value * math.sqrt(4.0)),
}
BATCH = np.sin(np.arange(2.0 * SIZE, dtype=np.float32)).reshape(2, SIZE)


def cases(names):
    """Each in one of the two ways to compile."""
    return [(name, ("compile", "compile with repeat")[at % 2]) for at, name in enumerate(names)]


def results(step, change):
    """Of two calls before the change, and of two after it."""
    found = []
    for call in range(4):
        if call == 2:
            change()
        batch = torch.tensor(BATCH + call)
        found.append(step(batch.to("jax")).detach().cpu().numpy())
    return found


@pytest.mark.parametrize("trains", [True, False], ids=["then evaluates", "then trains"])
@pytest.mark.parametrize(("name", "way"), cases(MODULES))
def test_the_mode_of_a_module(name, trains, way):
    def ran(way):
        layer = MODULES[name]().train(trains)
        step = WAYS[way](lambda batch: layer(batch) * 2)
        return results(step, lambda: layer.train(not trains))

    np.testing.assert_allclose(ran(way), ran("lazy"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "way"), cases(NAMES))
def test_a_name_that_is_bound_anew(name, way, monkeypatch):
    owner, attribute, step = NAMES[name]

    def ran(way):
        with monkeypatch.context() as patch:
            return results(
                WAYS[way](step),
                lambda: patch.setattr(owner, attribute, lambda *values: values[-1] * 5),
            )

    np.testing.assert_allclose(ran(way), ran("lazy"), rtol=1e-5, atol=1e-6)
