import jax
import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate
from tests.torch_bridge.lowerings.samples import FLOATS

aten = torch.ops.aten
N = 4000
LONG = torch.zeros(N)


def draw(op, *args, seed=0, **kwargs):
    return [np.asarray(a) for a in evaluate(op, *args, key=jax.random.key(seed), **kwargs)]


# (operator, arguments, mean, deviation) of what is drawn.
_MOMENTS = [
    (aten.rand.default, ([N],), 0.5, 12**-0.5),
    (aten.rand_like.default, (LONG,), 0.5, 12**-0.5),
    (aten.randn.default, ([N],), 0, 1),
    (aten.randn_like.default, (LONG,), 0, 1),
    (aten.randint.default, (10, [N]), 4.5, 8.25**0.5),
    (aten.randint.low, (-5, 5, [N]), -0.5, 8.25**0.5),
    (aten.randint_like.default, (LONG, 10), 4.5, 8.25**0.5),
    (aten.randint_like.low_dtype, (LONG, -5, 5), -0.5, 8.25**0.5),
    (aten.bernoulli.default, (LONG + 0.3,), 0.3, 0.21**0.5),
    (aten.bernoulli.p, (LONG, 0.3), 0.3, 0.21**0.5),
    (aten.bernoulli.Tensor, (LONG, torch.tensor(0.3)), 0.3, 0.21**0.5),
    (aten.normal.Tensor_float, (LONG + 2, 3.0), 2, 3),
    (aten.normal.float_Tensor, (2.0, LONG + 3), 2, 3),
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


@pytest.mark.parametrize(
    ("op", "args", "mean", "deviation"), _MOMENTS, ids=[str(case[0]) for case in _MOMENTS]
)
def test_moments(op, args, mean, deviation):
    (got,) = draw(op, *args)
    assert got.shape == (N,)
    assert abs(got.mean() - mean) < 5 * deviation / N**0.5
    assert abs(got.std() - deviation) < 0.15 * deviation


def test_cauchy_has_its_median():
    (got,) = draw(aten.cauchy.default, LONG, 2.0, 0.5)
    assert abs(np.median(got) - 2) < 0.1


def test_equal_keys_give_equal_numbers():
    first, again, other = (draw(aten.rand.default, [8], seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_one(dtype):
    (got,) = draw(aten.rand.default, [N], dtype=dtype)
    assert got.dtype.name == str(dtype).removeprefix("torch.")
    assert got.min() >= 0
    assert got.max() < 1


def test_whole_numbers_fill_their_type():
    (got,) = draw(aten.random.default, torch.zeros(N, dtype=torch.uint8))
    assert set(got.tolist()) <= set(range(256))
    assert got.max() > 240
    (bits,) = draw(aten.random.default, torch.zeros(N, dtype=torch.bool))
    assert 0.4 < bits.mean() < 0.6


def test_permutation():
    (got,) = draw(aten.randperm.default, 50)
    assert sorted(got.tolist()) == list(range(50))
    assert got.tolist() != list(range(50))


def test_multinomial_follows_the_weights():
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    (got,) = draw(aten.multinomial.default, weights, N, True)
    assert got.shape == (2, N)
    assert not (got[0] == 1).any()
    assert (got[1] == 1).all()
    assert abs((got[0] == 2).mean() - 0.75) < 0.05


def test_multinomial_without_replacement():
    (got,) = draw(aten.multinomial.default, torch.tensor([0.5, 0.0, 0.2, 0.3]), 3)
    assert sorted(got.tolist()) == [0, 2, 3]


def test_dropout():
    ones = LONG + 1
    values, mask = draw(aten.native_dropout.default, ones, 0.25, True)
    assert abs(mask.mean() - 0.75) < 0.05
    np.testing.assert_allclose(values, mask / 0.75, rtol=1e-6)
    check(aten.native_dropout_backward.default, ones, torch.as_tensor(mask.copy()), 1 / 0.75)


@pytest.mark.parametrize(("p", "train", "kept"), [(0.5, False, 1), (0.0, True, 1), (1.0, True, 0)])
def test_dropout_of_all_or_nothing(p, train, kept):
    values, mask = draw(aten.native_dropout.default, FLOATS, p, train)
    np.testing.assert_array_equal(values, FLOATS * kept)
    assert (mask == bool(kept)).all()


def test_random_slopes():
    x = torch.linspace(-1, 1, 200)
    values, slopes = draw(aten.rrelu_with_noise_functional.default, x, x, 0.1, 0.3, True)
    negative = x.numpy() <= 0
    assert ((slopes[negative] >= 0.1) & (slopes[negative] <= 0.3)).all()
    assert (slopes[~negative] == 1).all()
    np.testing.assert_allclose(values, x.numpy() * slopes)
    check(aten.rrelu_with_noise_functional.default, x, x, 0.1, 0.3, False)


COMPLEX = {
    "randn": lambda dtype, device: torch.randn(20_000, dtype=dtype, device=device),
    "randn_like": lambda dtype, device: torch.randn_like(_empty(dtype, device)),
    "normal_": lambda dtype, device: _empty(dtype, device).normal_(2.0, 3.0),
    "normal": lambda dtype, device: torch.normal(_empty(dtype, device).fill_(2 - 1j), 3.0),
    "rand": lambda dtype, device: torch.rand(20_000, dtype=dtype, device=device),
    "uniform_": lambda dtype, device: _empty(dtype, device).uniform_(-1, 3),
}


def _empty(dtype, device):
    return torch.empty(20_000, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("draw", COMPLEX.values(), ids=COMPLEX)
def test_both_parts_of_complex_numbers_are_drawn(draw, dtype):
    torch.manual_seed(0)
    want, got = draw(dtype, "cpu"), draw(dtype, "jax").cpu()
    assert got.dtype == dtype
    for one, other in ((want.real, got.real), (want.imag, got.imag)):
        assert abs(one.mean() - other.mean()) < 0.1
        assert abs(one.std() - other.std()) < 0.1
    parts = torch.stack([got.real, got.imag])
    assert abs(torch.corrcoef(parts)[0, 1]) < 0.05
