"""Chains of operators on drawn shapes and splits, forward and backward, against NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isoshard as iso
from isoshard import P

from .blocks import dense, in_blocks, out_of_blocks, padding_of, with_loss

MESHES = [((4,), ("x",)), ((8,), ("x",)), ((2, 4), ("x", "y"))]

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


@st.composite
def cases(draw):
    """A mesh, a spec, sizes, and the names of some links."""
    shape, names = draw(st.sampled_from(MESHES))
    entries = [draw(st.sampled_from(names)), None]
    if len(names) > 1 and draw(st.booleans()):
        entries = draw(st.sampled_from([["x", "y"], ["y", "x"], [("x", "y"), None]]))
    if draw(st.booleans()):
        entries.reverse()
    sizes, extents = [], []
    for entry in entries:
        if entry is None:
            sizes.append(None)
            extents.append(draw(st.integers(2, 6)))
            continue
        axes = (entry,) if isinstance(entry, str) else entry
        count = int(np.prod([shape[names.index(axis)] for axis in axes]))
        own = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        own[draw(st.integers(0, count - 1))] += 2
        sizes.append(tuple(own))
        extents.append(sum(own))
    links = draw(st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=3))
    return (shape, names), P(*entries), tuple(sizes), tuple(extents), ["poison", *links]


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_chains(case):
    (shape, names), spec, sizes, extents, links = case
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
