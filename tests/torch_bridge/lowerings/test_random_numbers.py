"""Draws: their moments, keys, bounds and dtypes; dropout."""

import jax
import numpy as np
import torch

from tests.torch_bridge.lowerings.harness import evaluate, evaluate_all, together
from tests.torch_bridge.lowerings.samples import FLOATS

aten = torch.ops.aten
N = 4000
LONG = torch.zeros(N)


def draw(op, *args, seed=0, **kwargs):
    return [np.asarray(a) for a in evaluate(op, *args, key=jax.random.key(seed), **kwargs)]


# (operator, arguments, mean, deviation) of what is drawn.
_MOMENTS = [
    (aten.rand.default, ([N],), 0.5, 12**-0.5),
    (aten.randn.default, ([N],), 0, 1),
    (aten.randint.default, (10, [N]), 4.5, 8.25**0.5),
    (aten.randint.low, (-5, 5, [N]), -0.5, 8.25**0.5),
    (aten.randint_like.low_dtype, (LONG, -5, 5), -0.5, 8.25**0.5),
    (aten.bernoulli.default, (LONG + 0.3,), 0.3, 0.21**0.5),
    (aten.bernoulli.p, (LONG, 0.3), 0.3, 0.21**0.5),
    (aten.bernoulli.Tensor, (LONG, torch.tensor(0.3)), 0.3, 0.21**0.5),
    (aten.normal.Tensor_Tensor, (LONG + 2, LONG + 3), 2, 3),
    (aten.normal.float_float, (2.0, 3.0, [N]), 2, 3),
    (aten.normal_functional.default, (LONG, 2.0, 3.0), 2, 3),
    (aten.uniform.default, (LONG, -1.0, 3.0), 1, 4 * 12**-0.5),
    (aten.exponential.default, (LONG, 2.0), 0.5, 0.5),
    (aten.log_normal.default, (LONG, 0.0, 0.25), np.exp(1 / 32), 0.2622),
    (aten.geometric.default, (LONG, 0.25), 4, 12**0.5),
    (aten.poisson.default, (LONG + 4,), 4, 2),
    (aten._standard_gamma.default, (LONG + 4,), 4, 2),
    (aten.random.to, (LONG, 10), 4.5, 8.25**0.5),
    (getattr(aten.random, "from"), (LONG, -5, 5), -0.5, 8.25**0.5),
]


def test_moments():
    calls = [(op, args, {}) for op, args, _, _ in _MOMENTS]
    calls.append((aten.cauchy.default, (LONG, 2.0, 0.5), {}))
    *found, (cauchy,) = evaluate_all(calls, key=jax.random.key(0))
    for (got,), (op, _, mean, deviation) in zip(found, _MOMENTS, strict=True):
        got = np.asarray(got, dtype="float64")
        assert got.shape == (N,), op
        assert abs(got.mean() - mean) < 5 * deviation / N**0.5, op
        assert abs(got.std() - deviation) < 0.15 * deviation, op
    assert abs(np.median(cauchy) - 2) < 0.1


def test_equal_keys_give_equal_numbers():
    first, again, other = (draw(aten.rand.default, [8], seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_bounds_of_draws():
    floats = torch.float32, torch.bfloat16, torch.float16
    calls = [(aten.rand.default, ([N],), {"dtype": dtype}) for dtype in floats]
    for dtype in (torch.uint8, torch.bool):
        calls.append((aten.random.default, (torch.zeros(N, dtype=dtype),), {}))
    calls.append((aten.randperm.default, (50,), {}))
    found = evaluate_all(calls, key=jax.random.key(0))
    *shares, whole, bits, order = (np.asarray(one) for (one,) in found)
    for got, dtype in zip(shares, floats, strict=True):
        assert got.dtype.name == str(dtype).removeprefix("torch.")
        assert got.min() >= 0 and got.max() < 1
    assert set(whole.tolist()) <= set(range(256)) and whole.max() > 240
    assert 0.4 < bits.mean() < 0.6
    assert sorted(order.tolist()) == list(range(50)) != order.tolist()


def test_multinomial_follows_the_weights():
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    (got,) = draw(aten.multinomial.default, weights, N, True)
    assert got.shape == (2, N)
    assert not (got[0] == 1).any()
    assert (got[1] == 1).all()
    assert abs((got[0] == 2).mean() - 0.75) < 0.05
    # Without replacement.
    (got,) = draw(aten.multinomial.default, torch.tensor([0.5, 0.0, 0.2, 0.3]), 3)
    assert sorted(got.tolist()) == [0, 2, 3]


def test_dropout():
    ones = LONG + 1
    values, mask = draw(aten.native_dropout.default, ones, 0.25, True)
    assert abs(mask.mean() - 0.75) < 0.05
    np.testing.assert_allclose(values, mask / 0.75, rtol=1e-6)
    for p, train, kept in ((0.5, False, 1), (0.0, True, 1), (1.0, True, 0)):
        values, every = draw(aten.native_dropout.default, FLOATS, p, train)
        np.testing.assert_array_equal(values, FLOATS * kept)
        assert (every == bool(kept)).all()
    x = torch.linspace(-1, 1, 200)
    negative = x.numpy() <= 0
    for op in (aten.rrelu_with_noise_functional.default, aten.rrelu_with_noise.default):
        values, slopes = draw(op, x, x.clone(), 0.1, 0.3, True)
        assert ((slopes[negative] >= 0.1) & (slopes[negative] <= 0.3)).all()
        assert np.unique(slopes[negative]).size > 50 and (slopes[~negative] == 1).all()
        np.testing.assert_allclose(values, x.numpy() * slopes)
    with together() as check:
        check(aten.native_dropout_backward.default, ones, torch.as_tensor(mask.copy()), 1 / 0.75)
        check(aten.rrelu_with_noise_functional.default, x, x, 0.1, 0.3, False)


def test_both_parts_of_complex_normal_numbers_are_drawn():
    torch.manual_seed(0)
    dtype = torch.complex64
    made = [torch.empty(20_000, dtype=dtype, device=d).fill_(2 - 1j) for d in ("cpu", "jax")]
    pairs = [(torch.randn_like(x), x.clone().normal_(2.0, 3.0), torch.normal(x, 3.0)) for x in made]
    for want, got in zip(*pairs, strict=True):
        parts = torch.view_as_real(got.cpu()).T
        assert got.dtype == dtype and abs(torch.corrcoef(parts)[0, 1]) < 0.05
        for one, other in zip(torch.view_as_real(want).T, parts, strict=True):
            assert abs(one.mean() - other.mean()) < 0.1 and abs(one.std() - other.std()) < 0.1
