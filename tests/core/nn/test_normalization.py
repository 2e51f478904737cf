"""Statistics and gradients of normalizations against torch's in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.nn.normalization import affine, input_gradient, reciprocal_rms, statistics
from isoshard.core.nn.precision import averaged

RNG = np.random.default_rng(0)
X, GRAD, SCALE, SHIFT = (RNG.normal(size=shape) for shape in ((3, 4, 5), (3, 4, 5), 5, 5))


@pytest.mark.parametrize("mean_of", [averaged, jnp.mean])
def test_layer_norm(mean_of, x64):
    x = torch.from_numpy(X).requires_grad_()
    want = F.layer_norm(x, (5,), torch.from_numpy(SCALE), torch.from_numpy(SHIFT), 1e-3)
    want.backward(torch.from_numpy(GRAD))
    mean, variance, rstd = statistics(jnp.asarray(X), (2,), 1e-3, mean_of)
    y = (X - mean) * rstd
    np.testing.assert_allclose(variance, X.var(2, keepdims=True))
    np.testing.assert_allclose(affine(y, SCALE, SHIFT), want.detach(), rtol=1e-12, atol=1e-12)
    got = input_gradient(GRAD * SCALE, y, rstd, (2,))
    np.testing.assert_allclose(got, x.grad, rtol=1e-12, atol=1e-12)


def test_rms_norm(x64):
    x = torch.from_numpy(X).requires_grad_()
    want = F.rms_norm(x, (5,), torch.from_numpy(SCALE), 1e-3)
    want.backward(torch.from_numpy(GRAD))
    rstd = reciprocal_rms(jnp.asarray(X), (2,), 1e-3)
    y = X * rstd
    np.testing.assert_allclose(affine(y, SCALE, None), want.detach(), rtol=1e-12, atol=1e-12)
    got = input_gradient(GRAD * SCALE, y, rstd, (2,), centred=False)
    np.testing.assert_allclose(got, x.grad, rtol=1e-12, atol=1e-12)


def test_nothing_to_scale_or_shift_by():
    y = jnp.ones(3)
    assert affine(y, None, None) is y
