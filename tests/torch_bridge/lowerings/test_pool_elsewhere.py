"""Gradients of maxima on a TPU: it selects and scatters no 64 bits and no unbatched images."""

from unittest import mock

import jax
import numpy as np
import pytest
import torch
from jax import export, lax

from isoshard.torch_bridge.lowerings.pool import max_pool_backward

ONES = [((2, 3), "float64"), ((3,), "float32"), ((3,), "float64")]


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def _gradient(grad, x, indices):
    return max_pool_backward(2, grad, x, 3, 2, 1, 1, False, indices)


def _inputs(lead, dtype):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.integers(0, 9, (*lead, 7, 8)).astype(dtype))  # with ties
    out, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    return torch.tensor(rng.normal(size=out.shape).astype(dtype)), x, indices


@pytest.mark.parametrize(("lead", "dtype"), ONES)
def test_the_gradient_by_places_is_that_of_torch(lead, dtype):
    grad, x, indices = _inputs(lead, dtype)
    x.requires_grad_()
    torch.nn.functional.max_pool2d(x, 3, 2, 1).backward(grad)
    chosen = lambda *given, tpu, default: tpu(*given)  # noqa: E731
    with mock.patch.object(lax, "platform_dependent", chosen):
        got = _gradient(grad.numpy(), x.detach().numpy(), indices.numpy())
    np.testing.assert_allclose(got, x.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("lead", "dtype"), [*ONES, ((2, 3), "float32")])
def test_a_tpu_selects_and_scatters_what_it_can(lead, dtype):
    structs = [jax.ShapeDtypeStruct(x.shape, x.numpy().dtype) for x in _inputs(lead, dtype)]

    def text(platform):
        return export.export(jax.jit(_gradient), platforms=[platform])(*structs).mlir_module()

    assert "select_and_scatter" in text("cpu")
    assert ("select_and_scatter" in text("tpu")) == ((lead, dtype) not in ONES)
