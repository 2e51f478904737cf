"""Pooling against CPU torch: windows of one size, adaptive and fractional ones, on meshes."""

from __future__ import annotations

from unittest import mock

import jax
import numpy as np
import pytest
import torch
from jax import export, lax
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.lowerings import registry
from isoshard.torch_bridge.lowerings.pool import max_pool_backward
from tests.torch_bridge.lowerings.harness import as_cpu, to_array
from tests.torch_bridge.lowerings.samples import INF, NAN

aten = torch.ops.aten


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# shape, kernel, stride, padding, dilation, ceil mode
MAXIMA = {
    "stride is the kernel": ((2, 3, 6, 8), [2, 2], [], [0, 0], [1, 1], False),
    "overlapping": ((2, 3, 7, 7), [3, 3], [1, 1], [1, 1], [1, 1], False),
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


def test_maxima_and_their_gradients():
    """Values and positions; with ties the gradient goes to the first."""
    special = [[-INF, -INF, 1, NAN], [-INF, -INF, NAN, 2], [3, INF, 0, 0], [0, 0, 0, 0]]
    cases = {}
    for name, (shape, *options) in MAXIMA.items():
        pool = lambda x, o=options: max_ops(o[0])[0](x, *o)  # noqa: E731
        x = randn(*shape)
        cases |= {f"ties, {name}": (pool, x.round())}
        if name in ("overlapping", "3d"):
            cases[name] = (pool, x)
            cases[f"halves, {name}"] = (lambda x, pool=pool: pool(x.detach()), x.bfloat16())
    positions = lambda x, *o: F.max_pool2d(x.detach(), *o, return_indices=True)  # noqa: E731
    cases["special"] = (lambda x: positions(x, 2), torch.tensor([special]))
    low = torch.full((1, 2, 2), -INF)
    cases["low"] = (lambda x: positions(x, 3, 1, 1), low)
    cases["back"] = (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2,
                                              output_size=(6, 7)), randn(2, 3, 6, 6))  # fmt: skip
    cases["3d back"] = (lambda x: aten.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True),
                                                    [4, 4, 5], [2] * 3, [0] * 3),
                        randn(2, 4, 4, 4))  # fmt: skip
    as_cpu(cases)


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


def test_averages_adaptive_and_fractional_pools_and_their_gradients():
    cases = {}
    # shape, kernel, stride, padding, ceil mode, count padding, divisor
    for shape, *options in (
        ((2, 3, 7, 7), [3, 3], [], [1, 1], False, False, None),
        ((2, 3, 6, 7), [3, 2], [2, 2], [1, 1], True, True, None),
        ((3, 6, 7), [3, 2], [2, 2], [1, 1], False, True, 5),
        ((2, 2, 5, 4, 6), [2, 3, 2], [2, 1, 2], [1, 1, 0], True, False, None),
    ):
        op = getattr(aten, f"avg_pool{len(options[0])}d")
        mean = lambda x, op=op, o=options: op(x, *o)  # noqa: E731
        cases[f"mean {shape} {options}"] = (mean, randn(*shape))
        if shape == (2, 3, 7, 7):  # CPU torch has no avg_pool3d of bfloat16
            cases[f"mean of halves {shape} {options}"] = (mean, randn(*shape).bfloat16())
    for shape, size in (
        ((1, 2, 6, 4), [3, 2]),  # divides
        ((1, 2, 3, 2), [5, 4]),  # larger
        ((2, 5, 4, 6), [2, 3, 4]),
    ):
        average, largest = (getattr(F, f"adaptive_{n}_pool{len(size)}d") for n in ("avg", "max"))
        pool = lambda x, f=largest, n=size: f(x, n, return_indices=True)  # noqa: E731
        if size != [2, 3, 4]:
            cases[f"mean {shape} {size}"] = (lambda x, f=average, n=size: f(x, n), randn(*shape))
        cases[f"largest {shape} {size}"] = (pool, randn(*shape).round())  # with ties
    # With the same random places.
    nan = randn(2, 3, 5, 5)
    nan[0, 0, 1:3, 1:3] = NAN
    for x, *options in (
        (nan, [3, 3], [2, 2]),
        (randn(2, 3, 5, 6, 7), [2, 3, 2], [3, 2, 4]),
    ):
        rank = len(options[0])
        op, samples = getattr(aten, f"fractional_max_pool{rank}d"), torch.rand(2, 3, rank)
        pool = lambda x, places, op=op, o=options: op(x, *o, places.detach())  # noqa: E731
        cases[f"fractional {tuple(x.shape)} {options}"] = (pool, x, samples)
    cases["fractional of nothing"] = (
        lambda x, places: aten.fractional_max_pool2d(x.detach(), [2, 2], [2, 2], places.detach()),
        *(randn(0, 3, 5, 5), torch.rand(2, 3, 2)),
    )
    as_cpu(cases)
    x = randn(1, 1, 8, 8)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = NAN  # the last one is found
    for size in (3, 4):
        pool = torch.nn.AdaptiveMaxPool2d(size, return_indices=True)
        for one, other in zip(pool(x.to("jax")), pool(x), strict=True):
            assert torch.equal(one.cpu().nan_to_num(9.0), other.nan_to_num(9.0))


def test_pooling_of_an_image_that_is_split(mesh):
    """Two kinds in one program in either order; a gradient lies as the split image."""
    spec = P(None, None, "y")
    x = -torch.rand(2, 2, 8, 8, generator=torch.Generator().manual_seed(0)) - 1
    kinds = [F.avg_pool2d, F.max_pool2d]

    def both(x, kinds):
        x.requires_grad_()
        made = [kind(x, 3, 1, 1) for kind in kinds]
        (made[0] * made[1]).sum().backward()
        return [*(one.detach() for one in made), x.grad]

    def gradients(x):
        y = F.max_pool2d(x.requires_grad_(), 3, 1, 1, dilation=2)
        return torch.autograd.grad(y.square().sum(), x)

    got = gradients(iso.shard(x.to("jax"), mesh, spec))
    xs.sync()
    for one, other in zip(got, gradients(x.clone()), strict=True):
        assert one.partition_spec == spec
        torch.testing.assert_close(one.cpu(), other)
    for order in (kinds, kinds[::-1]):
        got = both(iso.shard(x.to("jax"), mesh, spec), order)
        xs.sync()
        for one, other in zip(got, both(x.clone(), order), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


# A TPU selects and scatters no 64 bits and no unbatched images.

ONES = [((2, 3), "float64"), ((3,), "float32"), ((3,), "float64")]


@pytest.mark.parametrize(("lead", "dtype"), [*ONES, ((2, 3), "float32")])
def test_the_gradient_of_maxima_on_a_tpu(lead, dtype):
    def gradient(grad, x, indices):
        return max_pool_backward(2, grad, x, 3, 2, 1, 1, False, indices)

    rng = np.random.default_rng(0)
    x = torch.tensor(rng.integers(0, 9, (*lead, 7, 8)).astype(dtype))  # with ties
    x.requires_grad_()
    out, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    grad = torch.tensor(rng.normal(size=out.shape).astype(dtype))
    out.backward(grad)
    given = [one.detach().numpy() for one in (grad, x, indices)]
    with jax.enable_x64(True):
        structs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given]
        texts = {
            platform: export.export(jax.jit(gradient), platforms=[platform])(*structs).mlir_module()
            for platform in ("cpu", "tpu")
        }
        assert "select_and_scatter" in texts["cpu"]
        assert ("select_and_scatter" in texts["tpu"]) == ((lead, dtype) not in ONES)
        chosen = lambda *given, tpu, default: tpu(*given)  # noqa: E731
        if (lead, dtype) in ONES:
            with mock.patch.object(lax, "platform_dependent", chosen):
                made = jax.jit(lambda *given: gradient(*given))(*given)
                np.testing.assert_allclose(made, x.grad, rtol=1e-6, atol=1e-6)
