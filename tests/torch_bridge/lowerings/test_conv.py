"""Convolutions, unfold and fold against CPU torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.conv import gradient_of_weight
from isoshard.torch_bridge.lowerings.program_partition import compiling_for
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

# input, weight, stride, padding, dilation, transposed, output padding, groups
CASES = {
    "1d": ((2, 3, 8), (4, 3, 3), [1], [0], [1], False, [0], 1),
    "2d": ((2, 3, 8, 7), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "3d": ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), [1, 2, 1], [0, 1, 1], [1] * 3, False, [0] * 3, 1),
    "one number for all axes": ((2, 3, 8, 8), (4, 3, 3, 3), [2], [1], [1], False, [0], 1),
    "groups": ((2, 4, 6, 6), (6, 2, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "1 by 1": ((2, 3, 4, 4), (5, 3, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "transposed": ((2, 3, 5, 4), (3, 4, 3, 2), [2, 3], [1, 0], [1, 2], True, [1, 2], 1),
    "transposed 1d": ((2, 3, 5), (3, 4, 3), [2], [3], [2], True, [1], 1),
    "transposed groups": ((2, 4, 5, 5), (4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 2),
    "empty batch": ((0, 3, 8, 8), (4, 3, 3, 3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
}


def operands(case):
    torch.manual_seed(0)
    shape, kernel, *options = case
    outputs = kernel[1] * options[-1] if options[3] else kernel[0]
    return torch.randn(shape), torch.randn(kernel) / 3, torch.randn(outputs), options


@pytest.mark.parametrize("name", CASES)
def test_convolution(name):
    x, weight, bias, options = operands(CASES[name])
    check(aten.convolution.default, x, weight, bias, *options, **CLOSE)
    check(aten.convolution.default, x, weight, None, *options, **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_backward(name):
    x, weight, bias, options = operands(CASES[name])
    grad = torch.randn_like(aten.convolution(x, weight, bias, *options))
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        arguments = (grad, x, weight, [len(bias)], *options, mask)
        want = aten.convolution_backward(*arguments)
        got = evaluate(aten.convolution_backward.default, *arguments)
        for have, wish in zip(got, want, strict=True):
            assert (have is None) == (wish is None)
            if wish is not None:
                np.testing.assert_allclose(have, wish, rtol=1e-3, atol=1e-3)


def test_bfloat16():
    x, weight, bias, options = operands(CASES["2d"])
    half = (x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    check(aten.convolution.default, *half, *options, rtol=5e-2, atol=5e-2)


def test_flags_of_the_backend_change_nothing():
    x, weight, bias, options = operands(CASES["groups"])
    check(aten._convolution.default, x, weight, bias, *options, *[False] * 4, **CLOSE)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_padding_by_name(padding, kernel):
    x, weight = torch.randn(2, 3, 8, 9), torch.randn(4, 3, kernel, 3)
    (got,) = evaluate(aten._convolution_mode.default, x, weight, None, [1, 1], padding, [1, 2], 1)
    want = torch.nn.functional.conv2d(x, weight, padding=padding, dilation=(1, 2))
    np.testing.assert_allclose(got, want, **CLOSE)


def test_conv_tbc():
    arguments = torch.randn(7, 2, 3), torch.randn(3, 3, 4), torch.randn(4), 1
    check(aten.conv_tbc.default, *arguments, **CLOSE)


COLUMNS = [
    ((2, 3, 6, 5), [2, 3], [1, 1], [0, 0], [1, 1]),
    ((2, 3, 6, 7), [2, 3], [2, 1], [1, 2], [2, 3]),
    ((3, 6, 5), [2, 2], [1, 1], [1, 0], [2, 2]),
]


@pytest.mark.parametrize(("shape", "kernel", "dilation", "padding", "stride"), COLUMNS)
def test_unfold_and_fold(shape, kernel, dilation, padding, stride):
    x, options = torch.randn(shape), (kernel, dilation, padding, stride)
    check(aten.im2col.default, x, *options)
    columns = torch.randn_like(aten.im2col(x, *options))
    check(aten.col2im.default, columns, list(shape[-2:]), *options)


def test_program_is_the_one_written_by_hand():
    x, weight, _, options = operands(CASES["2d"])
    function = registry.find(aten.convolution.default).function
    ours = jax.make_jaxpr(lambda x, w: function(x, w, None, *options))
    plain = jax.make_jaxpr(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (2, 1), [(1, 1), (0, 0)], rhs_dilation=(1, 2)
        )
    )
    arrays = to_array(x), to_array(weight)
    assert str(ours(*arrays)) == str(plain(*arrays))


GROUPED = {
    "depthwise": ((2, 16, 9, 12), (16, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 16),
    "wider": ((2, 12, 9, 8), (24, 3, 2, 3), [2, 1], [1, 0], [1, 2], False, [0, 0], 4),
    "1d": ((3, 6, 11), (6, 2, 3), [2], [2], [1], False, [0], 3),
    "3d": ((1, 4, 4, 5, 4), (8, 1, 2, 3, 2), [1, 2, 1], [0, 1, 1], [1] * 3, False, [0] * 3, 4),
    "transposed": ((2, 8, 5, 5), (8, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, None) for name in GROUPED)]
    + [(name, torch.channels_last) for name in ("depthwise", "wider", "transposed")],
)
def test_the_weights_gradient_of_groups_is_taken_group_by_group(name, format, dtype):
    x, weight, _, options = operands(GROUPED[name])
    x, weight = (t.to(dtype) for t in (x, weight))
    want = weight.clone().double().requires_grad_()
    out = aten.convolution(x.double(), want, None, *options)
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad.double())

    @xs.compile
    def step(grad, x, weight):
        mask = [False, True, False]
        return aten.convolution_backward(grad, x, weight, None, *options, mask)[1]

    moved = [t if format is None else t.to(memory_format=format) for t in (grad, x, weight)]
    got = step(*(t.to("jax") for t in moved))
    assert got.dtype == dtype
    close = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    np.testing.assert_allclose(got.cpu().double(), want.grad, rtol=close, atol=10 * close)
    # In one piece, XLA for CPUs makes the gradient between all channels.
    text = xs.program_text(step)
    assert "while(" in text
    assert "_group_count" not in text


def test_the_weights_gradient_of_groups_under_vmap_and_differentiated(x64):
    x, weight, _, options = operands(GROUPED["wider"])
    x, weight = (t.double() for t in (x, weight))
    grad = torch.randn_like(aten.convolution(x, weight, None, *options))
    arrays = [to_array(t) for t in (grad, x, weight)]

    def squares(grad, x):
        return (gradient_of_weight(grad, x, arrays[2], *options) ** 2).sum()

    def wanted(grad, x):
        mask = [False, True, False]
        slope = aten.convolution_backward(grad, x, weight, None, *options, mask)[1]
        return slope.square().sum()

    want = torch.autograd.grad(wanted(grad.requires_grad_(), x.requires_grad_()), (grad, x))
    with compiling_for([]):  # known to be whole
        text = str(jax.make_jaxpr(squares)(*arrays[:2]))
        got = jax.jit(jax.grad(squares, (0, 1)))(*arrays[:2])
        pairs = [jax.numpy.stack([a, 2 * a]) for a in arrays[:2]]
        mapped = jax.jit(jax.vmap(squares))(*pairs)
    assert "platform_index" in text
    for have, wish in zip(got, want, strict=True):
        np.testing.assert_allclose(have, wish, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(mapped, [squares(*(p[i] for p in pairs)) for i in (0, 1)])
