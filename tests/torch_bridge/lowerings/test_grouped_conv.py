"""Convolutions in groups whose batch, and channels, are split over a mesh: nothing is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives

BATCH, BOTH = P("x"), P(("x", "y"))
CASES = [  # function, images, kernel, options, layout of either
    (F.conv2d, (16, 16, 6, 6), (32, 2, 3, 3), {"groups": 8, "padding": 1}, (BATCH, P())),
    (F.conv2d, (8, 8, 6, 6), (16, 1, 3, 3), {"groups": 8, "stride": 2}, (BOTH, P())),
    (F.conv2d, (4, 8, 5, 6), (8, 2, 3, 2), {"groups": 4, "dilation": 2}, (P("x", "y"), P())),
    (F.conv2d, (4, 8, 5, 6), (16, 1, 3, 3), {"groups": 8}, (P("x", "y"), P("y"))),
    (F.conv2d, (4, 16, 5, 6), (16, 2, 3, 3), {"groups": 8}, (BATCH, P("y"))),
    (F.conv1d, (8, 16, 9), (16, 1, 3), {"groups": 16, "padding": 2}, (BOTH, P())),
    (F.conv3d, (4, 8, 4, 4, 4), (8, 1, 3, 3, 3), {"groups": 8, "padding": 1}, (BATCH, P())),
    (F.conv_transpose1d, (8, 16, 9), (16, 2, 4), {"groups": 8, "stride": 2}, (BATCH, P())),
    (F.conv_transpose2d, (4, 8, 4, 5), (8, 1, 3, 3), {"groups": 8}, (P("x", "y"), P("y"))),
    (F.conv_transpose3d, (4, 8, 3, 3, 3), (8, 2, 2, 2, 2), {"groups": 8}, (BATCH, P())),
]
KINDS = ("all_reduce", "all_gather")
LOOSE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def mesh():
    return iso.make_mesh((2, 4), ("x", "y"))


def derived(function, options, x, weight):
    """A result and both gradients."""
    x, weight = (leaf.detach().requires_grad_() for leaf in (x, weight))
    out = function(x, weight, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))]


def assert_near(got, want, dtype):
    got, want = got.cpu().double(), want.double()
    assert (got - want).abs().max() <= LOOSE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", LOOSE, ids=str)
def test_only_the_gradients_of_kernels_are_summed(dtype):
    source = torch.Generator().manual_seed(0)
    given = [
        [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
        for _, *shapes, _, _ in CASES
    ]
    placed = [
        [
            iso.shard(leaf.to("jax"), mesh(), spec)
            for leaf, spec in zip(leaves, case[-1], strict=True)
        ]
        for leaves, case in zip(given, CASES, strict=True)
    ]

    @xs.compile
    def step(given):
        return [derived(case[0], case[3], *own) for case, own in zip(CASES, given, strict=True)]

    found = step(placed)
    for case, leaves, results in zip(CASES, given, found, strict=True):
        want = derived(case[0], case[3], *(leaf.double() for leaf in leaves))
        for got, wish in zip(results, want, strict=True):
            assert_near(got, wish, dtype)
    sent = collectives(xs.program_text(step))
    bytes_of = {kind: sum(one.bytes for one in sent if one.kind == kind) for kind in KINDS}
    assert {each.kind for each in sent} <= set(KINDS)
    kernels = sum(leaf.numel() for _, leaf in given)
    assert bytes_of["all_reduce"] <= kernels * max(4, dtype.itemsize)  # sums are wide
    # Gradients lie as their leaves: two leaves are whole along channels that the other splits.
    whole = given[2][1].numel() + given[4][0].numel() // 2
    assert bytes_of["all_gather"] <= whole * max(4, dtype.itemsize)


def test_channels_that_are_split_within_a_group_are_gathered():
    x, weight = torch.randn(4, 24, 5, 5), torch.randn(12, 4, 3, 3)
    placed = iso.shard(x.to("jax"), mesh(), P("x", "y")), iso.shard(weight.to("jax"), mesh(), P())
    options = {"groups": 6}
    for got, want in zip(
        derived(F.conv2d, options, *placed),
        derived(F.conv2d, options, x.double(), weight.double()),
        strict=True,
    ):
        assert_near(got, want, torch.float32)


def in_torch(x, weight):
    return F.conv2d(torch.sin(x), weight, padding=1, groups=8)


def in_jax(x, weight):
    pads = [(1, 1), (1, 1)]
    return lax.conv_general_dilated(jnp.sin(x), weight, (1, 1), pads, feature_group_count=8)


def loss_of(function):
    return lambda *given: (function(*given) ** 3).sum()


def gradients(function):
    return jax.grad(loss_of(function), (0, 1))


def second(function):
    return jax.grad(lambda *given: sum((g**2).sum() for g in gradients(function)(*given)), (0, 1))


def moved(function):
    return lambda *given: jax.jvp(gradients(function), given, given)


def by_example(function):
    return lambda x, weight: jax.vmap(moved(function), (0, None))(x[:, None], weight)


@pytest.mark.parametrize("derive", [gradients, second, moved, by_example])
@pytest.mark.parametrize("channels", [8, 16], ids=["depthwise", "two in a group"])
def test_in_functions_of_jax(derive, channels):
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(8, channels, 4, 4)).astype(np.float32)
    weight = numbers.normal(size=(8, channels // 8, 3, 3)).astype(np.float32)
    placed = jax.device_put(x, jax.NamedSharding(mesh(), P("y")))
    function = derive(iso.jax_function(in_torch))
    program = jax.jit(function).lower(placed, weight).compile()
    want = jax.jit(derive(in_jax))(x, weight)
    found = program(placed, weight)
    for got, wish in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wish, rtol=1e-4, atol=1e-4 * np.abs(wish).max())
    assert {each.kind for each in collectives(program.as_text())} <= {"all_reduce"}


def test_functions_of_jax_on_a_mesh_are_exported():
    x, weight = np.ones((8, 8, 4, 4), np.float32), np.ones((8, 1, 3, 3), np.float32)
    placed = jax.device_put((x, weight), jax.NamedSharding(mesh(), P("y")))
    function = jax.jit(iso.jax_function(in_torch))
    again = jax.export.deserialize(jax.export.export(function)(*placed).serialize())
    np.testing.assert_allclose(again.call(*placed), in_jax(x, weight), rtol=1e-5, atol=1e-5)
