"""Singular vectors by polar forms, and that a TPU's programs are without what it cannot compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from isoshard.torch_bridge.lowerings import singular_vectors
from isoshard.torch_bridge.lowerings.singular_vectors import by_polar_form, svd

SHAPES = [(5, 5), (7, 3), (3, 7), (2, 4, 3), (2, 3, 1, 2), (1, 1)]


def _matrix(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def _check(a, full, u, s, vh):
    least = min(a.shape[-2:])
    lead = a.shape[:-2]
    assert u.shape == (*lead, a.shape[-2], a.shape[-2] if full else least)
    assert vh.shape == (*lead, a.shape[-1] if full else least, a.shape[-1])
    assert (u.dtype, s.dtype, vh.dtype) == (a.dtype, np.dtype("float32"), a.dtype)
    scale = max(float(np.abs(a).max()), 1e-30)
    np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False), rtol=1e-5, atol=3e-6 * scale)
    near = {"rtol": 0, "atol": 2e-5}
    np.testing.assert_allclose(u.mT @ u, np.broadcast_to(*_eye(u, -1)), **near)
    np.testing.assert_allclose(vh @ vh.mT, np.broadcast_to(*_eye(vh, -2)), **near)
    again = (u[..., :least] * s[..., None, :]) @ vh[..., :least, :]
    np.testing.assert_allclose(again, a, rtol=0, atol=2e-5 * scale)


def _eye(x, axis):
    size = x.shape[axis]
    return np.eye(size, dtype=x.dtype), (*x.shape[:-2], size, size)


_factors = jax.jit(by_polar_form, static_argnums=1)


@pytest.mark.parametrize(("shape", "full"), [*zip(SHAPES, [False, True] * 3, strict=True)][1::2])
def test_factors(shape, full):
    a = _matrix(shape)
    _check(a, full, *map(np.asarray, _factors(a, full)))


@pytest.mark.parametrize(("shape", "full"), [((6, 3), True), ((3, 6), False)])
def test_factors_of_rank_deficient_small_and_large_matrices(shape, full):
    products = [_matrix((shape[0], n)) @ _matrix((n, shape[1]), seed=1) for n in (0, 1, 2)]
    batch = np.stack(products)
    _check(batch, full, *map(np.asarray, _factors(batch, full)))
    for scale in (1e-12, 1e12):
        a = np.stack([_matrix(shape, seed) for seed in range(3)]) * np.float32(scale)
        _check(a, full, *map(np.asarray, _factors(a, full)))


def test_what_is_not_finite_gives_nan_alone():
    a = _matrix((2, 4, 3))
    a[0, 1, 1] = np.inf
    for part in _factors(a, True):
        assert np.isnan(part[0]).all()
        assert np.isfinite(part[1]).all()


def test_derivatives_are_those_of_jax():
    a, da = (jnp.asarray(_matrix((2, 4, 3), seed=seed)) for seed in (0, 1))

    def of(decompose):
        def function(a):  # of what does not depend on the vectors' phases
            u, s, vh = decompose(a)
            row = u[..., :1, :]
            weights = jnp.arange(s.shape[-1]) + 1
            product = row * weights @ vh
            return jnp.abs(u) ** 2, s, jnp.abs(vh) ** 2, product

        return jax.jit(lambda a, da: jax.jvp(function, (a,), (da,)))(a, da)

    got = of(lambda a: by_polar_form(a, False))
    want = of(lambda a: jnp.linalg.svd(a, full_matrices=False))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_gradients_pass_where_there_are_branches_for_platforms():
    a = jnp.asarray(_matrix((4, 3)))
    gradient = jax.grad(lambda a: svd(a, full_matrices=False)[1].sum())(a)
    u, _, vh = jnp.linalg.svd(a, full_matrices=False)
    np.testing.assert_allclose(gradient, u @ vh, rtol=1e-4, atol=1e-5)


def test_full_vectors_have_no_derivative():
    a = jnp.asarray(_matrix((4, 3)))
    with pytest.raises(
        NotImplementedError, match=r"full singular vectors of 4 x 3 .* full_matrices=F"
    ):
        jax.jvp(lambda a: by_polar_form(a, True), (a,), (a,))


def _program(shape, dtype, platform, full):
    function = jax.jit(lambda a: svd(a, full_matrices=full))
    anything = [export.DisabledSafetyCheck.custom_call("ALL")]
    made = export.export(function, platforms=[platform], disabled_checks=anything)
    return made(jax.ShapeDtypeStruct(shape, dtype)).mlir_module()


def _mixed(text):
    """Products of matrices with integers of 64 bits."""
    return [line for line in text.split("\n") if "dot_general" in line and "xi64>" in line]


def test_a_tpu_multiplies_no_64_bit_integers(monkeypatch):
    assert _mixed(_program((2, 5, 3), "float32", "tpu", True)) == []
    chosen = lambda *given, tpu, default: default(*given)  # noqa: E731
    monkeypatch.setattr(singular_vectors.lax, "platform_dependent", chosen)
    # JAX's own: when it fails, drop ours
    assert _mixed(_program((2, 5, 3), "float32", "tpu", True))


def test_other_platforms_have_their_own():
    assert "stablehlo.while" not in _program((4, 4), "float32", "cuda", False)
    assert "stablehlo.while" in _program((4, 4), "float32", "tpu", False)


def test_complex_vectors_are_multiplied_with_no_integers():
    assert _mixed(_program((2, 5, 3), "complex64", "tpu", False)) == []
