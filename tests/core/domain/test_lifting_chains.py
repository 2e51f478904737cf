"""Chains of operators on drawn shapes and splits, forward and backward, against NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings

import isoshard as iso

from .blocks import dense, in_blocks, out_of_blocks, padding_of, with_loss
from .drawn import cases

LINKS = {
    "poison": lambda x: jnp.where(x != 0, x * x / x, 0.0),
    "tanh": jnp.tanh,
    "centre": lambda x: x - x.mean(0),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "norm": lambda x: x / (1 + jnp.sqrt((x**2).mean(1, keepdims=True))),
    "cumsum": lambda x: jnp.cumsum(x, 0) / x.shape[0],
    "flip": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 2, 0),
    "turn": lambda x: x.T,
    "gram": lambda x: x @ (x.T @ x) / x.size,
    "outer": lambda x: jnp.tanh(x @ x.T) @ x / x.shape[0],
    "fold": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
    "cut": lambda x: jnp.concatenate([x[1:], 2 * x[:1]], 0),
    "largest": lambda x: x - jax.lax.stop_gradient(x.max(0, keepdims=True)),
    "add its rows": lambda x: x + x.sum(1, keepdims=True),
    "set": lambda x: x.at[0].set(0.5),
}


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(LINKS, least=2, most=3))
def test_chains(case):
    (shape, names), spec, sizes, extents, drawn = case
    links = ["poison", *drawn]
    x = np.random.default_rng(0).normal(size=extents).astype(np.float32)
    u = in_blocks(x, iso.make_mesh(shape, names), spec, sizes)

    def chain(x):
        for link in links:
            x = LINKS[link](x)
        return x

    lifted = iso.domain.lift(with_loss(chain))
    (_, found), gradient = jax.jit(jax.value_and_grad(lifted, has_aux=True))(u)
    want, (want_gradient,) = dense(chain, x)
    np.testing.assert_allclose(out_of_blocks(found), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out_of_blocks(gradient), want_gradient, rtol=1e-3, atol=1e-3)
    assert gradient.sharding.is_equivalent_to(u.sharding, 2)
    assert not padding_of(gradient).any()
