"""The networks are the same in both frameworks, on one device and on a mesh."""

import doctest
import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
from examples.domain.in_jax import mean_square
from examples.domain.place import Place
from examples.domain.runs import Run
from examples.domain.unet import UNet, unet

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "domain"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"examples.domain.{name}")).failed == 0


def test_the_gradient_over_uneven_shards_is_that_of_torch_in_float64():
    torch.manual_seed(0)
    module = UNet(width=4)
    params = {name: p.detach().numpy() for name, p in module.named_parameters()}
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 1, 32, 8)).astype(np.float32)
    place = Place(iso.make_mesh((2, 4), ("data", "space")), (12, 4, 0, 16))

    def loss_of(params, x, y):
        return mean_square(unet(params, x, place), y)

    spoiled = place.put(x)
    filled = jax.numpy.where(spoiled.mask(), spoiled.array, np.float32(np.nan))
    spoiled = iso.UnevenArray(filled, spoiled.shape, spoiled.sizes, spoiled.layout)
    step = jax.jit(jax.value_and_grad(loss_of)).lower(params, spoiled, place.put(y)).compile()
    loss, grads = step(params, spoiled, place.put(y))
    module.double()
    wanted = torch.nn.functional.mse_loss(module(torch.tensor(x).double()), torch.tensor(y))
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad.numpy(), atol=2e-5, err_msg=name)
    told = Run([], functools.partial(unet, params), 0, step.as_text()).collectives
    assert set(told) == {"all-reduce", "collective-permute"}
