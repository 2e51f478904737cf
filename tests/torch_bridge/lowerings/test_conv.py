"""Convolutions, unfold and fold against CPU torch."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.conv import gradient_of_weight
from isoshard.torch_bridge.lowerings.program_partition import compiling_for
from tests.torch_bridge.lowerings.harness import as_cpu, to_array

aten = torch.ops.aten

# input, weight, stride, padding, dilation, transposed, output padding, groups
CASES = {
    "1d": ((2, 3, 8), (4, 3, 3), [1], [0], [1], False, [0], 1),
    "2d": ((2, 3, 8, 7), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "3d": ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), [1, 2, 1], [0, 1, 1], [1] * 3, False, [0] * 3, 1),
    "groups": ((2, 4, 6, 6), (6, 2, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "transposed": ((2, 3, 5, 4), (3, 4, 3, 2), [2, 3], [1, 0], [1, 2], True, [1, 2], 1),
    "transposed groups": ((2, 4, 5, 5), (4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 2),
    "empty batch": ((0, 3, 8, 8), (4, 3, 3, 3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
}


WITHOUT_A_BIAS = ("1d", "3d", "depthwise", "transposed groups", "empty batch")


def operands(case):
    torch.manual_seed(0)
    shape, kernel, *options = case
    outputs = kernel[1] * options[-1] if options[3] else kernel[0]
    return torch.randn(shape), torch.randn(kernel) / 3, torch.randn(outputs), options


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_convolutions_and_their_gradients():
    """With a bias and without, in bfloat16, padded by name; windows as columns and back."""
    cases = {}
    for name, case in CASES.items():
        *given, options = operands(case)
        conv = lambda x, w, b=None, o=options: aten.convolution(x, w, b, *o)  # noqa: E731
        cases[name] = (conv, *(given[:2] if name in WITHOUT_A_BIAS else given))
        if name == "2d":
            halves = lambda *given, f=conv: f(*(t.detach() for t in given))  # noqa: E731
            as_cpu({"halves": (halves, *(t.bfloat16() for t in given))}, half=5e-2)
            fixed = lambda x, w, b, conv=conv: conv(x.detach(), w.detach(), b)  # noqa: E731
            cases["of the bias only"] = (fixed, *given)
    cases["flags change nothing"] = (
        lambda x, w: aten._convolution(x, w, None, *CASES["groups"][2:], *[False] * 4),
        *operands(CASES["groups"])[:2],
    )
    for padding, kernel in (("same", 2), ("valid", 4)):
        cases[f"{padding} {kernel}"] = (
            lambda x, w, p=padding: torch.nn.functional.conv2d(x, w, padding=p, dilation=(1, 2)),
            *(torch.randn(2, 3, 8, 9), torch.randn(4, 3, kernel, 3)),
        )
    given = torch.randn(7, 2, 3), torch.randn(3, 3, 4), torch.randn(4)
    cases["time first"] = (lambda x, w, b: torch.conv_tbc(x, w, b, 1), *given)
    for shape, *options in (((3, 6, 7), [2, 3], [2, 1], [1, 2], [2, 3]),):
        unfold = lambda x, o=options: aten.im2col(x, *o)  # noqa: E731
        cases[f"columns of {shape}"] = (unfold, torch.randn(shape))
        columns = torch.randn_like(unfold(torch.randn(shape)))
        fold = lambda x, o=options, s=shape: aten.col2im(x, s[-2:], *o)  # noqa: E731
        cases[f"{shape} of columns"] = (fold, columns)
    as_cpu(cases, rtol=1e-3, atol=1e-3)


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


def test_the_weights_gradient_of_groups_is_taken_group_by_group():
    last, cases = torch.channels_last, []
    for name, format, dtype in (
        ("depthwise", last, torch.bfloat16),
        ("wider", None, torch.bfloat16),
        ("1d", None, torch.float64),
        ("3d", None, torch.float32),
        ("transposed", last, torch.float64),
    ):
        x, weight, _, options = operands(GROUPED[name])
        x, weight = (t.to(dtype) for t in (x, weight))
        want = weight.clone().double().requires_grad_()
        out = aten.convolution(x.double(), want, None, *options)
        grad = torch.randn(out.shape, dtype=dtype)
        out.backward(grad.double())
        moved = [t.to(memory_format=format) if format else t for t in (grad, x, weight)]
        cases.append((name, options, [t.to("jax") for t in moved], want.grad))

    @xs.compile
    def step(given):
        mask = [False, True, False]
        return [
            aten.convolution_backward(*operands, None, *options, mask)[1]
            for operands, (_, options, _, _) in zip(given, cases, strict=True)
        ]

    for got, (name, _, (_, _, weight), want) in zip(
        step([moved for _, _, moved, _ in cases]), cases, strict=True
    ):
        assert got.dtype == weight.dtype
        close = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-2}[got.dtype]
        near = {"rtol": close, "atol": 10 * close}
        np.testing.assert_allclose(got.cpu().double(), want, **near, err_msg=name)
    # In one piece, XLA for CPUs makes the gradient between all channels.
    text = xs.program_text(step)
    assert text.count("while(") >= len(cases)
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

    total = wanted(grad.requires_grad_(), x.requires_grad_())
    want = torch.autograd.grad(total, (grad, x))
    with compiling_for([]):  # known to be whole
        text = str(jax.make_jaxpr(squares)(*arrays[:2]))
        got = jax.jit(jax.grad(squares, (0, 1)))(*arrays[:2])
        pairs = [jax.numpy.stack([a, 2 * a]) for a in arrays[:2]]
        mapped = jax.jit(jax.vmap(squares))(*pairs)
    assert "platform_index" in text
    for have, wish in zip(got, want, strict=True):
        np.testing.assert_allclose(have, wish, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(mapped, total.item() * np.array([1, 2**4]))


def test_images_are_turned_before_the_first_convolution_and_after_the_last():
    first, second = (torch.ones(4, 4, 3, 3, device="jax") for _ in range(2))

    @xs.compile
    def step(x):
        x = torch.nn.functional.silu(torch.nn.functional.conv2d(x, first))
        return torch.nn.functional.conv2d(x + x.abs(), second)

    for _ in range(2):
        assert step(torch.ones(2, 4, 9, 8, device="jax")).shape == (2, 4, 5, 4)
    turned = re.findall(r"\[2,\S+ transpose\(", xs.program_text(step))
    assert len(turned) == 2, turned
