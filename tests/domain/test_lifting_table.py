"""Operators of ShardTensor's table, and those that it gets wrong, on every kind of split.

Each is applied to `x * x / x`, whose padding is NaN, as are its gradients there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P, UnevenArray

from .blocks import dense, in_blocks, out_of_blocks, padding_of, with_loss

ROWS, COLUMNS = 18, 6
SPLITS = {
    "eight": ((8,), ("x",), P("x"), ((3, 0, 1, 4, 2, 5, 0, 3), None)),
    "two mesh axes": ((2, 4), ("x", "y"), P(("x", "y")), ((1, 4, 0, 4, 2, 2, 5, 0), None)),
}

OPERATORS = {
    "reductions": {
        "sum": lambda x, w: x.sum(0),
        "var": lambda x, w: x.var(0),
        "max": lambda x, w: x.max(0),
        "prod": lambda x, w: x.prod(0),
        "softmax": lambda x, w: jax.nn.softmax(x, 0),
        "logsumexp": lambda x, w: jax.nn.logsumexp(x),
        "all": lambda x, w: (x < 100).all(0),
        "argmax": lambda x, w: x.argmax(0),
    },
    "shapes": {
        "flat": lambda x, w: x.reshape(-1),
        "split the rows": lambda x, w: x.reshape(3, 6, COLUMNS),
        "unsqueeze": lambda x, w: x[None, :, None] * 2,
        "index": lambda x, w: x[jnp.array([0, 17, 3])],
        "index columns": lambda x, w: x[:, jnp.array([0, 3, 3])],
        "set a row": lambda x, w: x.at[4].set(1.0),
        "add to columns": lambda x, w: x.at[:, 1].add(x[:, 0]),
        "dynamic slice": lambda x, w: jax.lax.dynamic_slice(x, (3, 0), (4, COLUMNS)),
        "pad the columns": lambda x, w: jnp.pad(x, ((0, 0), (1, 1)), constant_values=w[0, 0]),
        "stack": lambda x, w: jnp.stack([x, x + 1], 1),
        "halves": lambda x, w: jnp.split(x, 2, 0)[1],
        "conv of each": lambda x, w: jax.lax.conv(x[:, None], w[:1, None, :3], (1,), "SAME"),
    },
}


@pytest.fixture
def numbers():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return np.sign(x) * (0.5 + np.abs(x)), random.normal(size=(COLUMNS, COLUMNS)).astype(np.float32)


def all_of(family):
    def run(x, w):
        x = x * x / x
        return {name: operator(x, w) for name, operator in OPERATORS[family].items()}

    return run


PAIRS = {
    "eight": "reductions",
    "two mesh axes": "shapes",
}


@pytest.mark.parametrize(("split", "family"), PAIRS.items())
def test_operators_on_any_split(split, family, numbers):
    shape, names, spec, sizes = SPLITS[split]
    x, w = numbers
    u = in_blocks(x, iso.make_mesh(shape, names), spec, sizes)
    lifted = iso.domain.lift(with_loss(all_of(family)))
    loss = jax.value_and_grad(lifted, argnums=(0, 1), has_aux=True)
    (_, results), gradients = jax.jit(loss)(u, w)
    want, want_gradients = dense(all_of(family), x, w)
    for name in OPERATORS[family]:
        leaves = jax.tree.leaves(results[name], is_leaf=lambda x: isinstance(x, UnevenArray))
        for found, right in zip(leaves, jax.tree.leaves(want[name]), strict=True):
            np.testing.assert_allclose(
                out_of_blocks(found), right, rtol=2e-4, atol=2e-4, err_msg=name
            )
    for found, right in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(out_of_blocks(found), right, rtol=1e-3, atol=1e-3)
    assert gradients[0].sizes == sizes
    assert gradients[0].sharding.is_equivalent_to(u.sharding, 2)
    assert not padding_of(gradients[0]).any()
