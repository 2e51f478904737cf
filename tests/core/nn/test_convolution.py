"""What convolutions share, against torch's in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch.nn import functional as F

from isoshard.core.nn.convolution import (
    along_channels,
    each_group,
    halves,
    kernel_gradient,
    transposed_kernel,
    transposed_padding,
)


def drawn(*shape):
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=source)


def test_halves():
    assert halves(4) == (2, 2)
    assert halves(5) == (2, 3)
    assert halves(5, more_before=True) == (3, 2)


def test_one_value_per_channel():
    assert along_channels(jnp.arange(3), 2).shape == (3, 1, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_is_a_plain_one(groups, x64):
    x, kernel = drawn(2, 4, 5, 6), drawn(4, 3, 3, 2)
    options = {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (2, 1)}
    want = F.conv_transpose2d(x, kernel, groups=groups, **options)
    stride, padding, extra, dilation = options.values()
    got = lax.conv_general_dilated(
        jnp.asarray(x.numpy()),
        transposed_kernel(jnp.asarray(kernel.numpy()), groups),
        (1, 1),
        transposed_padding((3, 2), dilation, [(p, p) for p in padding], extra),
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_gradient_of_a_kernel(groups, x64):
    image, kernel = drawn(2, 4, 9, 8), drawn(6, 4 // groups, 3, 2).requires_grad_()
    options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    out = F.conv2d(image, kernel, groups=groups, **options)
    grad = drawn(*out.shape)
    out.backward(grad)
    arrays = (jnp.asarray(tensor.numpy()) for tensor in (image, grad))
    got = kernel_gradient(*arrays, (3, 2), *options.values(), groups)
    np.testing.assert_allclose(got, kernel.grad, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_half_kernel_is_added_up_in_float32():
    image, grad = jnp.ones((1, 1, 4000), "bfloat16"), jnp.ones((1, 1, 4000), "bfloat16")
    got = kernel_gradient(image, grad, (1,), (1,), (0,), (1,), 1)
    assert (got.dtype, float(got[0, 0, 0])) == ("bfloat16", 4000.0)


@pytest.mark.parametrize(("groups", "rank"), [(1, 1), (2, 2), (3, 2), (6, 1), (6, 3)])
def test_each_group_by_itself(groups, rank, x64):
    x, kernel = drawn(2, 6, *(7, 6, 5)[:rank]), drawn(12, 6 // groups, *(3, 2, 3)[:rank])
    options = {
        "stride": (2, 1, 1)[:rank],
        "padding": (2, 0, 1)[:rank],
        "dilation": (1, 2, 1)[:rank],
    }
    want = getattr(F, f"conv{rank}d")(
        x.requires_grad_(), kernel.requires_grad_(), groups=groups, **options
    )
    grad = drawn(*want.shape)
    want.backward(grad)

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            *(x, kernel, options["stride"]),
            [(p, p) for p in options["padding"]],
            rhs_dilation=options["dilation"],
        )

    arrays = (jnp.asarray(tensor.detach().numpy()) for tensor in (x, kernel))
    got, pull = jax.vjp(functools.partial(each_group, convolve, groups=groups), *arrays)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    close(got, want.detach())
    for found, tensor in zip(pull(jnp.asarray(grad.numpy())), (x, kernel), strict=True):
        close(found, tensor.grad)


def test_each_group_with_channels_last():
    x, kernel = jnp.arange(16.0).reshape(1, 4, 4), jnp.arange(12.0).reshape(4, 1, 3)[:, :, ::-1]
    numbers = ("NHC", "OIH", "NHC")

    def convolve(x, kernel, groups=1):
        return lax.conv_general_dilated(
            *(x, kernel, (1,), "VALID"), dimension_numbers=numbers, feature_group_count=groups
        )

    got = each_group(convolve, x, kernel, 4, channels=2)
    np.testing.assert_allclose(got, convolve(x, kernel, 4))
