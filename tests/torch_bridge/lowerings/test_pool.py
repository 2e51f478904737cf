"""Pooling against CPU torch: windows of one size and adaptive ones, forward and backward."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten


def randn(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


# shape, kernel, stride, padding, dilation, ceil mode
MAXIMA = {
    "stride is the kernel": ((2, 3, 6, 8), [2, 2], [], [0, 0], [1, 1], False),
    "overlapping": ((2, 3, 7, 7), [3, 3], [1, 1], [1, 1], [1, 1], False),
    "one number": ((2, 3, 7, 7), [3], [2], [1], [1], False),
    "ceil": ((2, 3, 6, 7), [3, 2], [2, 2], [0, 1], [1, 1], True),
    "ceil drops a window in the padding": ((1, 1, 3, 3), [2, 2], [2, 2], [1, 1], [1, 1], True),
    "dilated": ((2, 3, 9, 8), [3, 2], [2, 1], [1, 0], [2, 3], False),
    "no batch": ((3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False),
    "empty batch": ((0, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False),
    "3d": ((2, 2, 5, 4, 6), [2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 1, 1], False),
    "3d dilated": ((2, 5, 5, 6), [2, 2, 2], [1, 1, 2], [1, 0, 0], [1, 2, 1], True),
}


def max_ops(kernel):
    rank = max(len(kernel), 2)
    names = f"max_pool{rank}d_with_indices", f"max_pool{rank}d_with_indices_backward"
    return [getattr(aten, name).default for name in names]


@pytest.mark.parametrize("values", ["random", "ties", "bfloat16"])
@pytest.mark.parametrize("case", MAXIMA)
def test_max_pool(case, values):
    """Values, positions, and where the gradient goes; with ties it goes to the first."""
    shape, *options = MAXIMA[case]
    x = randn(*shape)
    x = {"random": x, "ties": x.round(), "bfloat16": x.bfloat16()}[values]
    forward, backward = max_ops(options[0])
    check(forward, x, *options)
    out, indices = forward(x, *options)
    grad = torch.ones_like(out) if values == "bfloat16" else torch.randn_like(out)
    check(backward, grad, x, *options, indices)


def test_max_pool_of_special_values():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[[-inf, -inf, 1, nan], [-inf, -inf, nan, 2], [3, inf, 0, 0], [0, 0, 0, 0]]])
    check(aten.max_pool2d_with_indices.default, x, [2, 2])
    check(aten.max_pool2d_with_indices.default, torch.full((1, 2, 2), -inf), [3, 3], [1], [1])


def test_max_pool_gradient_is_the_one_of_jax():
    """No scatter by positions, so positions nobody reads cost nothing."""
    shape, *options = MAXIMA["overlapping"]
    forward, backward = max_ops(options[0])
    x = randn(*shape)
    out, indices = forward(x, *options)
    function = registry.find(backward).function
    program = jax.make_jaxpr(lambda g, x, i: function(g, x, *options, i))
    text = str(program(to_array(out), to_array(x), to_array(indices)))
    assert "select_and_scatter_add" in text
    assert "iota" not in text


def test_max_unpool():
    x = randn(2, 3, 6, 6)
    out, indices = aten.max_pool2d_with_indices(x, [2, 2])
    check(aten.max_unpool2d.default, out, indices, [6, 7])
    x = randn(2, 4, 4, 4)
    out, indices = aten.max_pool3d_with_indices(x, [2, 2, 2])
    check(aten.max_unpool3d.default, out, indices, [4, 4, 5], [2, 2, 2], [0, 0, 0])


# shape, kernel, stride, padding, ceil mode, count padding, divisor
AVERAGES = {
    "plain": ((2, 3, 6, 8), [2, 2], [], [0, 0], False, True, None),
    "padding counts": ((2, 3, 7, 7), [3, 3], [2, 1], [1, 1], False, True, None),
    "padding does not count": ((2, 3, 7, 7), [3, 3], [2, 1], [1, 1], False, False, None),
    "ceil": ((2, 3, 6, 7), [3, 2], [2, 2], [1, 1], True, True, None),
    "ceil, padding does not count": ((2, 3, 6, 7), [3, 2], [2, 2], [1, 1], True, False, None),
    "divisor": ((3, 6, 7), [3, 2], [2, 2], [1, 1], False, True, 5),
    "3d": ((2, 2, 5, 4, 6), [2, 3, 2], [2, 1, 2], [1, 1, 0], True, False, None),
}


@pytest.mark.parametrize("case", AVERAGES)
def test_avg_pool(case):
    shape, *options = AVERAGES[case]
    rank = len(options[0])
    forward, backward = (
        getattr(aten, name).default for name in (f"avg_pool{rank}d", f"avg_pool{rank}d_backward")
    )
    x = randn(*shape)
    check(forward, x, *options)
    if rank == 2:  # CPU torch has no avg_pool3d of bfloat16
        check(forward, x.bfloat16(), *options, rtol=1e-2, atol=1e-2)
    kernel, stride, *rest = options
    grad = torch.randn_like(forward(x, *options))
    check(backward, grad, x, kernel, stride, *rest)


# Adaptive

ADAPTIVE = {
    "to one": ((2, 3, 5, 4), [1, 1]),
    "divides": ((2, 3, 6, 4), [3, 2]),
    "uneven": ((2, 3, 7, 5), [3, 2]),
    "larger": ((2, 3, 3, 2), [5, 4]),
    "no batch": ((3, 7, 5), [2, 5]),
    "3d": ((2, 2, 5, 4, 6), [2, 3, 4]),
    "3d to one": ((2, 2, 5, 4, 6), [1, 1, 1]),
}


@pytest.mark.parametrize("case", ADAPTIVE)
def test_adaptive_avg_pool(case):
    shape, size = ADAPTIVE[case]
    name = f"_adaptive_avg_pool{len(size)}d"
    x = randn(*shape)
    check(getattr(aten, name).default, x, size)
    grad = torch.randn(*shape[: -len(size)], *size)
    check(getattr(aten, f"{name}_backward").default, grad, x)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", ADAPTIVE)
def test_adaptive_max_pool(case, ties):
    shape, size = ADAPTIVE[case]
    name = f"adaptive_max_pool{len(size)}d"
    x = randn(*shape).round() if ties else randn(*shape)
    check(getattr(aten, name).default, x, size)
    out, indices = getattr(aten, name)(x, size)
    check(getattr(aten, f"{name}_backward").default, torch.randn_like(out), x, indices)


def test_average_to_one_is_a_mean():
    x = randn(2, 3, 5, 4)
    (got,) = evaluate(aten._adaptive_avg_pool2d.default, x, [1, 1])
    np.testing.assert_allclose(got, x.mean((2, 3), keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P(None, None, "y"), P(None, None, "x", "y")])
@pytest.mark.parametrize("average_first", [True, False])
def test_two_kinds_of_pooling_of_an_image_that_is_split(mesh, spec, average_first):
    x = -torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)) - 1
    kinds = [torch.nn.functional.avg_pool2d, torch.nn.functional.max_pool2d]
    kinds = kinds if average_first else kinds[::-1]

    def program(x):
        x.requires_grad_()
        made = [kind(x, 3, 1, 1) for kind in kinds]
        (made[0] * made[1]).sum().backward()
        return [*(one.detach() for one in made), x.grad]

    got = program(iso.shard(x.to("jax"), mesh, spec))
    xs.sync()
    for one, other in zip(got, program(x), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [P(None, None, "y"), P(None, None, "x", "y")])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_gradient_that_has_to_lie_as_the_split_image(mesh, spec, dilation):
    x = -torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)) - 1

    def gradient(x):
        y = torch.nn.functional.max_pool2d(x, 3, 1, 1, dilation)
        y.square().sum().backward()
        return x.grad

    got = gradient(iso.shard(x.to("jax").requires_grad_(), mesh, spec))
    xs.sync()
    assert got.partition_spec == spec
    torch.testing.assert_close(got.cpu(), gradient(x.clone().requires_grad_()))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_adaptive_max_pool_finds_the_last_nan(size):
    x = randn(1, 1, 8, 8)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = float("nan")
    pool = torch.nn.AdaptiveMaxPool2d(size, return_indices=True)
    for one, other in zip(pool(x.to("jax")), pool(x), strict=True):
        assert torch.equal(one.cpu().nan_to_num(9.0), other.nan_to_num(9.0))
