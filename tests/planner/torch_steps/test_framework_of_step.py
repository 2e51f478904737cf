"""The framework of a step, without running it, and without loading torch for others."""

import functools

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.planner.traced.of_step import framework_of_step
from tests import fresh

MODEL = torch.nn.Linear(2, 2)


def reads_a_global(x):
    return MODEL(x)


class Trainer:
    def __init__(self):
        self.parts = {"optimizers": [torch.optim.SGD(MODEL.parameters())]}

    def step(self, x):
        return x


def closes_over(model):
    return lambda x: model(x)


def nested():
    def outer(x):
        return [reads_a_global(value) for value in x]

    return outer


SHAPE = jax.ShapeDtypeStruct((2,), "float32")


@pytest.mark.parametrize(
    ("step", "args"),
    [
        pytest.param(reads_a_global, (SHAPE,), id="global"),
        pytest.param(closes_over(MODEL), (SHAPE,), id="closure"),
        pytest.param(nested(), (SHAPE,), id="function in a function"),
        pytest.param(Trainer().step, (SHAPE,), id="bound method"),
        pytest.param(MODEL, (SHAPE,), id="module"),
        pytest.param(xs.compile(lambda x: x), (SHAPE,), id="compiled"),
        pytest.param(functools.partial(lambda m, x: x, MODEL), (SHAPE,), id="partial"),
        pytest.param(lambda x: x, ({"x": torch.ones(2)},), id="tensors"),
        pytest.param(lambda x: torch.relu(x), (SHAPE,), id="calls torch by name"),
    ],
)
def test_a_step_of_torch(step, args):
    assert framework_of_step(step, args).name == "torch"


@pytest.mark.parametrize("step", [jax.numpy.sin, jax.jit(lambda x: x), lambda x: x + 1])
def test_a_step_of_jax(step):
    assert framework_of_step(step, (SHAPE,)) is None


def test_torch_is_not_imported_for_a_step_of_jax(tmp_path):
    code = (
        "import sys, jax, jax.numpy as jnp, isoshard\n"
        "del sys.modules['torch']\n"
        "from isoshard.planner.traced.of_step import framework_of_step\n"
        "step = jax.jit(lambda p, x: jnp.tanh(x @ p['w']))\n"
        "assert framework_of_step(step, ({'w': jnp.ones((2, 2))}, jnp.ones(2))) is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = fresh.run(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
