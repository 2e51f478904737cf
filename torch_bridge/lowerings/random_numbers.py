"""Random numbers. The first argument of each function is a JAX PRNG key.

Equal keys give equal numbers on every mesh; they are not the numbers that torch's own generator
gives for a seed.

>>> from isoshard.torch_bridge.lowerings import registry
>>> rand = registry.find(torch.ops.aten.rand.default).function
>>> bool((rand(jax.random.key(0), (2,)) == rand(jax.random.key(0), (2,))).all())
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .argument_forms import as_scalar, cast, floating, index_dtype, wide
from .memory_order import lower_cloned, lower_elementwise
from .registry import lower


def _drawn(dtype: np.dtype | None) -> np.dtype:
    """The float dtype in which numbers are drawn that become another."""
    exact = dtype is not None and jnp.dtype(dtype) in (jnp.float64, jnp.complex128)
    return jnp.dtype(jnp.float64 if exact else jnp.float32)


def _open_uniform(key: jax.Array, x: jax.Array) -> jax.Array:
    """Uniform numbers in (0, 1), as many as `x` has: their logarithm is finite."""
    dtype = _drawn(x.dtype)
    return jax.random.uniform(key, x.shape, dtype, minval=jnp.finfo(dtype).tiny)


def _integers(
    key: jax.Array,
    shape: Sequence[int],
    low: int,
    high: jax.Array | int,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Integers in [low, high), or in as much of that as the dtype represents."""
    bounds = jnp.iinfo(dtype or jnp.int64)
    low, high = max(int(low), int(bounds.min)), min(int(high), int(bounds.max) + 1)
    bits = index_dtype(low, high)
    if bits == jnp.int32 and high <= jnp.iinfo(bits).max:
        return jax.random.randint(key, shape, low, high, bits)
    if high - low == 2**64:
        return jax.random.bits(key, shape, jnp.uint64).astype(dtype or jnp.int64)
    span = jnp.uint64 if high - low > 2**63 - 1 else jnp.int64
    first, end = (jnp.asarray(n, span) for n in (0, high - low))
    drawn = jax.random.randint(key, shape, first, end, span)
    start = jnp.asarray(low, jnp.int64 if low < 2**63 else jnp.uint64).astype(span)
    return (drawn + start).astype(dtype or jnp.int64)


@lower("aten::rand", "aten::rand.generator", random=True)
def rand(key: jax.Array, size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Uniform in [0, 1); both parts of complex numbers."""
    dtype = jnp.dtype(dtype or jnp.float32)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.uniform(key, tuple(size), dtype)
    real_dtype = jnp.finfo(dtype).dtype
    return jax.lax.complex(*jax.random.uniform(key, (2, *size), real_dtype))


@lower_cloned("aten::rand_like", "aten::rand_like.generator", random=True)
def rand_like(key: jax.Array, x: jax.Array, *, dtype: np.dtype | None = None) -> jax.Array:
    """Uniform in [0, 1), in the shape of `x`."""
    return rand(key, x.shape, dtype=dtype or x.dtype)


@lower("aten::randn", "aten::randn.generator", random=True)
def randn(key: jax.Array, size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Standard normal."""
    return jax.random.normal(key, tuple(size), dtype or jnp.float32)


@lower_cloned("aten::randn_like", "aten::randn_like.generator", random=True)
def randn_like(key: jax.Array, x: jax.Array, *, dtype: np.dtype | None = None) -> jax.Array:
    """Standard normal, in the shape of `x`."""
    return randn(key, x.shape, dtype=dtype or x.dtype)


@lower("aten::randint", "aten::randint.generator", random=True)
def randint(
    key: jax.Array, high: int, size: Sequence[int], *, dtype: np.dtype | None = None
) -> jax.Array:
    """Whole numbers in [0, high)."""
    return randint_low(key, 0, high, size)


@lower("aten::randint.low", "aten::randint.low_generator", random=True)
def randint_low(
    key: jax.Array,
    low: int,
    high: jax.Array | int,
    size: Sequence[int],
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Whole numbers in [low, high)."""
    return _integers(key, tuple(size), low, high)


@lower_cloned(
    "aten::randint_like",
    "aten::randint_like.generator",
    "aten::randint_like.Tensor",
    "aten::randint_like.Tensor_generator",
    random=True,
)
def randint_like(
    key: jax.Array, x: jax.Array, high: jax.Array | int, *, dtype: np.dtype | None = None
) -> jax.Array:
    """Whole numbers in [0, high), in the shape of `x`."""
    return randint_low(key, 0, high, x.shape)


@lower_cloned("aten::randint_like.low_dtype", "aten::randint_like.low_generator_dtype", random=True)
def randint_like_low(
    key: jax.Array, x: jax.Array, low: int, high: int, *, dtype: np.dtype | None = None
) -> jax.Array:
    """Whole numbers in [low, high), in the shape of `x`."""
    return randint_low(key, low, high, x.shape)


@lower("aten::randperm", "aten::randperm.generator", random=True)
def randperm(key: jax.Array, n: int, *, dtype: np.dtype | None = None) -> jax.Array:
    """The numbers 0 .. n - 1 in random order."""
    return jax.random.permutation(key, jax.lax.iota(index_dtype(n), n))


@lower("aten::random", random=True)
def random_(key: jax.Array, x: jax.Array) -> jax.Array:
    """Integers from 0 to the largest that the dtype of `x` represents exactly."""
    if x.dtype == bool:
        return random_from(key, x, 0, 2)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return random_from(key, x, 0, 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1)
    return random_from(key, x, 0, None)


@lower("aten::random.from", random=True)
def random_from(key: jax.Array, x: jax.Array, low: int, high: int | None) -> jax.Array:
    """Integers in [low, high), without `high` up to the largest that the dtype represents."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else None
    if high is None:
        high = int(jnp.iinfo(dtype or jnp.int64).max) + 1
    with jax.enable_x64(True):  # float32 represents integers beyond 32 bits only roughly
        return _integers(key, x.shape, low, high, dtype).astype(x.dtype)


@lower("aten::random.to", random=True)
def random_to(key: jax.Array, x: jax.Array, high: int) -> jax.Array:
    """Whole numbers in [0, high)."""
    return random_from(key, x, 0, high)


@lower("aten::bernoulli", random=True)
def bernoulli(key: jax.Array, x: jax.Array) -> jax.Array:
    """1 with the probability in each element of `x`, else 0."""
    return cast(jax.random.bernoulli(key, wide(x)), x.dtype)


@lower("aten::bernoulli.p", "aten::bernoulli.Tensor", random=True, lift=("p",))
def bernoulli_p(key: jax.Array, x: jax.Array, p: jax.Array | float) -> jax.Array:
    """1 with probability `p`, else 0, in the shape of `x`."""
    return cast(jax.random.bernoulli(key, floating(wide(jnp.asarray(p))), x.shape), x.dtype)


def _normal_shape(
    mean: torch.Tensor | float, std: torch.Tensor | float = 1.0, **_: Any
) -> torch.Tensor:
    """torch's shape function compares a deviation that it made complex."""
    model: Any = mean if isinstance(mean, torch.Tensor) else std
    if not isinstance(std, torch.Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    shapes = [each.shape for each in (mean, std) if isinstance(each, torch.Tensor)]
    return torch.empty(torch.broadcast_shapes(*shapes), dtype=model.dtype, device="meta")


@lower(
    "aten::normal.Tensor_float",
    "aten::normal.float_Tensor",
    "aten::normal.Tensor_Tensor",
    random=True,
    lift=("mean", "std"),
    meta=_normal_shape,
)
def normal(key: jax.Array, mean: jax.Array | float, std: jax.Array | float = 1.0) -> jax.Array:
    """Normal with elementwise mean and deviation."""
    mean, std = floating(wide(jnp.asarray(mean))), floating(wide(jnp.asarray(std)))
    shape = jnp.broadcast_shapes(mean.shape, std.shape)
    return mean + std * _normal(key, shape, jnp.result_type(mean, std))


def _normal(key: jax.Array, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    """Standard normal; each part of a complex number has half of the variance, as in torch."""
    dtype = _drawn(dtype) if not jnp.issubdtype(dtype, jnp.complexfloating) else dtype
    return jax.random.normal(key, shape, dtype)


@lower("aten::normal.float_float", random=True, lift=("mean", "std"))
def normal_float(
    key: jax.Array,
    mean: jax.Array | float,
    std: jax.Array | float,
    size: Sequence[int],
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Normal with one mean and deviation."""
    dtype = jnp.dtype(dtype or jnp.float32)
    drawn = std * _normal(key, tuple(size), dtype)
    return drawn + (jax.lax.complex(mean, mean) if jnp.iscomplexobj(drawn) else mean)


@lower("aten::normal_functional", random=True, lift=("mean", "std"))
def normal_functional(
    key: jax.Array, x: jax.Array, mean: jax.Array | float = 0.0, std: jax.Array | float = 1.0
) -> jax.Array:
    """Normal with one mean and deviation, in the shape of `x`."""
    return normal_float(key, mean, std, x.shape, dtype=x.dtype)


@lower("aten::uniform", random=True, lift=("from", "to"))
def uniform(
    key: jax.Array, x: jax.Array, low: jax.Array | float = 0.0, high: jax.Array | float = 1.0
) -> jax.Array:
    """Uniform in [low, high), in the shape of `x`."""
    drawn = (high - low) * rand(key, x.shape, dtype=x.dtype)
    return drawn + (jax.lax.complex(low, low) if jnp.iscomplexobj(x) else low)


@lower("aten::exponential", random=True, lift=("lambd",))
def exponential(key: jax.Array, x: jax.Array, lambd: jax.Array | float = 1.0) -> jax.Array:
    """Exponential with rate `lambd`, in the shape of `x`; never 0."""
    return -jnp.log(_open_uniform(key, x)) / lambd


@lower("aten::cauchy", random=True, lift=("median", "sigma"))
def cauchy(
    key: jax.Array, x: jax.Array, median: jax.Array | float = 0.0, sigma: jax.Array | float = 1.0
) -> jax.Array:
    """Cauchy, in the shape of `x`."""
    return median + sigma * jax.random.cauchy(key, x.shape, _drawn(x.dtype))


@lower("aten::log_normal", random=True, lift=("mean", "std"))
def log_normal(
    key: jax.Array, x: jax.Array, mean: jax.Array | float = 1.0, std: jax.Array | float = 2.0
) -> jax.Array:
    """The exponential of a normal, in the shape of `x`."""
    return jnp.exp(normal_float(key, mean, std, x.shape, dtype=x.dtype))


@lower("aten::geometric", random=True, lift=("p",))
def geometric(key: jax.Array, x: jax.Array, p: jax.Array | float) -> jax.Array:
    """The number of tries up to the first success of probability `p`, in the shape of `x`."""
    draws = jnp.ceil(jnp.log(_open_uniform(key, x)) / jnp.log1p(-jnp.asarray(p)))
    return jnp.maximum(draws, 1)


@lower("aten::poisson", random=True)
def poisson(key: jax.Array, x: jax.Array) -> jax.Array:
    """Poisson with the rate in each element of `x`."""
    return jax.random.poisson(_threefry(key), wide(x)).astype(x.dtype)


def _threefry(key: jax.Array) -> jax.Array:
    """The key in the one implementation that `jax.random.poisson` supports."""
    bits = jax.random.bits(key, (2,), jnp.uint32)
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


@lower("aten::binomial", random=True, meta=lambda count, prob, *_: torch.empty_like(count + prob))
def binomial(key: jax.Array, count: jax.Array, prob: jax.Array) -> jax.Array:
    """The number of successes in `count` tries of probability `prob`."""
    shape: Any = jnp.broadcast_shapes(count.shape, prob.shape)
    return jax.random.binomial(key, wide(count), wide(prob), shape).astype(count.dtype)


@lower("aten::_standard_gamma", random=True, meta=lambda x, *_: torch.empty_like(x))
def standard_gamma(key: jax.Array, x: jax.Array) -> jax.Array:
    """Gamma with the shape parameter in each element of `x`."""
    return jax.random.gamma(key, wide(x)).astype(x.dtype)


@lower("aten::_standard_gamma_grad")
def standard_gamma_grad(x: jax.Array, output: jax.Array) -> jax.Array:
    """How a gamma draw moves with its parameter."""
    return jax.lax.random_gamma_grad(wide(x), wide(output))


@lower("aten::_sample_dirichlet", random=True, meta=lambda x, *_: torch.empty_like(x))
def sample_dirichlet(key: jax.Array, x: jax.Array) -> jax.Array:
    """Dirichlet with concentrations along the last axis of `x`."""
    return jax.random.dirichlet(key, wide(x)).astype(x.dtype)


@lower("aten::multinomial", random=True)
def multinomial(
    key: jax.Array, x: jax.Array, num_samples: int, replacement: bool = False
) -> jax.Array:
    """Places along the last axis of `x`, drawn with its (unnormalised) probabilities."""
    logits = jnp.log(wide(x))
    if replacement:
        draws = jax.random.categorical(key, logits, shape=(num_samples, *x.shape[:-1]))
        return jnp.moveaxis(draws, 0, -1)
    noisy = jnp.where(x > 0, logits + jax.random.gumbel(key, x.shape, logits.dtype), -jnp.inf)
    return jnp.argsort(noisy, axis=-1, descending=True)[..., :num_samples]


@lower("aten::native_dropout", random=True)
def native_dropout(
    key: jax.Array, x: jax.Array, p: float, train: bool | None = True
) -> tuple[jax.Array, jax.Array]:
    """Elements dropped with probability `p`, the others scaled to keep the mean; and the mask."""
    if train is False:
        return x, jnp.ones(x.shape, bool)
    if p >= 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    mask = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(mask, wide(x) / (1 - p), 0), mask


@lower_elementwise("aten::native_dropout_backward", lift=("scale",))
def native_dropout_backward(
    grad_output: jax.Array, mask: jax.Array, scale: jax.Array | float
) -> jax.Array:
    """The gradient of dropout: the kept elements, scaled."""
    return jnp.where(mask, wide(grad_output) * scale, 0)


@lower("aten::rrelu_with_noise", random=True, writes=("noise",))
@lower("aten::rrelu_with_noise_", random=True, writes=("self", "noise"))
@lower("aten::rrelu_with_noise_functional", random=True)
def rrelu_with_noise(
    key: jax.Array,
    x: jax.Array,
    noise: jax.Array,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Negative elements times a random slope (the mean slope outside training); and the slopes."""
    if not training:
        return jnp.where(x <= 0, x * ((lower + upper) / 2), x), noise
    drawn = jax.random.uniform(key, x.shape, _drawn(x.dtype), minval=lower, maxval=upper)
    factors = drawn.astype(x.dtype)
    factors = jnp.where(x <= 0, factors, as_scalar(1, x.dtype))
    return x * factors, factors
