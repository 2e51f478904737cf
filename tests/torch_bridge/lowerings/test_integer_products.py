"""Products and convolutions of integers: the same on each platform, and none that one lacks."""

import math
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from jax import export, lax

from isoshard.torch_bridge.lowerings import conv, integer_products, matmul

SHAPES = [
    *(((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 0), (0, 3))),
    *(((5, 2, 3), (5, 3, 4)), ((3,), (5, 3, 2)), ((5, 2, 3), (3,))),
]


def _numbers(shape, dtype="int64"):
    """Over the whole range: products wrap around."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng(sum(shape))
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def _elsewhere(platform):
    """The branch of a platform instead of the one that is lowered here."""

    def chosen(*operands, default, **others):
        return others.get(platform, default)(*operands)

    return mock.patch.object(lax, "platform_dependent", chosen)


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


AXES = [
    ((4, 5, 3), (((2, 1), (0, 2)), ((), ()))),
    ((4, 2, 3), (((1,), (2,)), ((0,), (1,)))),
    ((3, 2, 5), (((), ()), ((0, 1), (1, 0)))),
    ((5,), (((), ()), ((), ()))),
]


def test_summed_products_are_exact():
    @jax.jit
    def products(pairs, others):
        with _elsewhere("tpu"):
            found = [integer_products.matmul(*pair) for pair in pairs]
            contracted = [
                (integer_products.dot_general(a, b, axes), lax.dot_general(a, b, axes))
                for (a, b), (_, axes) in zip(others, AXES, strict=True)
            ]
        return found, contracted

    pairs = [(_numbers(left), _numbers(right)) for left, right in SHAPES]
    found, contracted = products(pairs, [(_numbers((2, 3, 4)), _numbers(b)) for b, _ in AXES])
    for got, pair in zip(found, pairs, strict=True):
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, np.matmul(*pair))
    for got, want in contracted:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("platform", "rank", "groups", "stride", "gap", "step", "last"),
    [
        ("tpu", 1, 1, 1, 1, None, False),
        ("cuda", 1, 2, 2, 2, 2, False),
        ("tpu", 2, 2, 2, 1, None, True),
        ("cuda", 2, 1, 1, 2, 2, True),
        ("cuda", 3, 2, 2, 2, None, False),
    ],
)
def test_summed_convolutions_are_exact(platform, rank, groups, stride, gap, step, last):
    x, w = _numbers((2, 4, *[6] * rank)), _numbers((6, 4 // groups, *[2] * rank))
    numbers = None
    if last:
        images = (0, rank + 1, *range(1, rank + 1))
        numbers = lax.ConvDimensionNumbers(images, (rank + 1, rank, *range(rank)), images)
        x, w = np.moveaxis(x, 1, -1), w.transpose(*range(2, rank + 2), 1, 0)
    options = {
        "feature_group_count": groups,
        "dimension_numbers": numbers,
        "window_strides": (stride,) * rank,
        "padding": [(1, -1)] * rank,
        "rhs_dilation": (gap,) * rank,
    }
    options |= {} if step is None else {"lhs_dilation": (step,) * rank}

    @jax.jit
    def both(x, w):
        want = lax.conv_general_dilated(x, w, **options)
        with _elsewhere(platform):
            return integer_products.convolution(x, w, **options), want

    np.testing.assert_array_equal(*both(x, w))


def _text(function, platform, *operands):
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return export.export(jax.jit(function), platforms=[platform])(*structs).mlir_module()


def _convolved(x, w):
    return conv.convolve(x, w, 1, 0, 1, False, 0, 1)


@pytest.mark.parametrize(
    ("function", "left", "right", "dtype", "named", "lack"),
    [
        (matmul._matmul, (2, 3), (3, 2), "int64", "dot_general", {"tpu"}),
        (matmul.linear, (2, 3), (2, 3), "int64", "dot_general", {"tpu"}),
        (matmul._dot, (3,), (3,), "int64", "dot_general", {"tpu"}),
        (matmul._matmul, (2, 3), (3, 2), "int32", "dot_general", set()),
        (_convolved, (1, 2, 4, 4), (3, 2, 2, 2), "int64", "convolution", {"tpu", "cuda"}),
        (_convolved, (1, 2, 4, 4), (3, 2, 2, 2), "int32", "convolution", {"cuda"}),
        (_convolved, (1, 2, 4, 4), (3, 2, 2, 2), "float32", "convolution", set()),
    ],
)
def test_a_platform_gets_no_product_that_it_lacks(function, left, right, dtype, named, lack):
    operands = np.zeros(left, dtype), np.zeros(right, dtype)
    for platform in ("cpu", "tpu", "cuda"):
        has = f"stablehlo.{named}" in _text(function, platform, *operands)
        assert has == (platform not in lack), platform


def test_torch_products_of_integers_are_what_they_were():
    f, whole = torch.nn.functional, lambda *shape: torch.arange(math.prod(shape)).reshape(shape)
    for run, operands in (
        (torch.mm, (whole(2, 3) << 60, whole(3, 4))),
        (torch.addmm, (torch.ones(2, 4, dtype=torch.int64), whole(2, 3) << 60, whole(3, 4))),
        (torch.matmul, (whole(2, 3, 1, 4), whole(2, 3, 4, 1))),
        (f.bilinear, (whole(2, 3), whole(2, 4), whole(2, 3, 4))),
        (lambda x, w: f.conv2d(x, w, stride=2), (whole(1, 2, 5, 5), whole(2, 2, 2, 2))),
    ):
        assert torch.equal(run(*(x.to("jax") for x in operands)).cpu(), run(*operands))
