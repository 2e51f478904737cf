"""Masks computed tile by tile from what they were made of."""

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn.tiled_mask import MaskTerms, Slice, mask_terms, tiled_mask

ROWS, COLUMNS = 7, 9
IDS = jnp.array([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
KEEP = jnp.arange(COLUMNS) < jnp.array([[9], [6]])
BIAS = jax.random.normal(jax.random.key(0), (2, 3, ROWS, COLUMNS))


def positions():
    return jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS)


def causal():
    rows, columns = positions()
    return columns <= rows


def window():
    rows, columns = positions()
    return causal() & (rows + 1 - columns < 4) & jnp.ones((), bool)


def of_documents(ids):
    same = ids[:, None, :ROWS, None] == ids[:, None, None, :]
    return same & causal() & KEEP[:, None, None, :]


def decay(keep):
    rows, columns = positions()
    far = -abs(rows - columns).astype(jnp.float32)
    return jnp.where(keep[:, None, None, :], far * jnp.arange(1.0, 4.0)[:, None, None], -jnp.inf)


CASES = {
    "causal": (causal, []),
    "tril": (lambda: jnp.tril(jnp.ones((ROWS, COLUMNS), bool), 1), []),
    "window": (window, []),
    "documents": (of_documents, [IDS]),
    "decay": (decay, [KEEP]),
    "learned": (lambda bias: jnp.where(causal(), bias.transpose(0, 1, 2, 3), -1.0), [BIAS]),
    "not elementwise": (lambda bias: jnp.cumsum(bias, -1)[0] > 0, [BIAS]),
}


def of(name):
    function, arguments = CASES[name]
    return tiled_mask(jax.make_jaxpr(function)(*arguments), arguments)


def test_tiles_are_those_of_the_mask():
    for name, (function, arguments) in CASES.items():
        mask, want = of(name), np.asarray(function(*arguments))
        want = want.reshape((1,) * (4 - want.ndim) + want.shape)
        np.testing.assert_array_equal(mask.dense(), want, err_msg=name)
        tile = mask.tile(Slice(2, 2, 3), Slice(jnp.int32(4), jnp.int32(4), 5))
        tile = jnp.broadcast_to(tile, (*want.shape[:2], 3, 5))
        np.testing.assert_array_equal(tile, want[:, :, 2:5, 4:9], err_msg=name)
        assert (mask.shape, mask.dtype) == (want.shape, want.dtype)


def test_leaves_are_small_and_functions_are_equal_between_layers():
    for name in ("causal", "tril", "window", "documents", "decay"):
        mask = of(name)
        assert all(leaf.size < ROWS * COLUMNS for leaf in mask.leaves), name
        assert hash(mask.function) == hash(of(name).function) and mask.function == of(name).function
    assert not of("causal").leaves


def test_terms_are_those_of_kernels():
    assert mask_terms(of("causal")) == MaskTerms(after=0)
    assert mask_terms(of("tril")) == MaskTerms(after=1)
    assert mask_terms(of("window")) == MaskTerms(before=2, after=0)
    terms = mask_terms(of("documents"))
    assert (terms.before, terms.after) == (None, 0)
    np.testing.assert_array_equal(terms.same[0], IDS[:, :ROWS])
    np.testing.assert_array_equal(terms.same[1], IDS)
    np.testing.assert_array_equal(terms.keys, KEEP)
    assert [mask_terms(of(name)) for name in ("decay", "learned", "not elementwise")] == [None] * 3
