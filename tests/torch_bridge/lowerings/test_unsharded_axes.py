"""Operations that cannot be split along an axis get it whole, and are right on every layout."""

import jax
import jax.numpy as jnp
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.lowerings.program_partition import compiling_for
from isoshard.torch_bridge.lowerings.unsharded_axes import unsharded

SPECS = [P(("x", "y")), P(None, ("x", "y")), P("x", "y"), P("y")]


def test_only_the_named_axes_become_whole(mesh):
    split = jax.NamedSharding(mesh, P("x", "y"))
    x = jax.device_put(jnp.zeros((8, 8)), split)
    with compiling_for([split]):
        got = jax.jit(lambda x: unsharded(x + 1, [-1]))(x)
    assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("x")), 2)


def test_transforms_of_split_axes(mesh):
    x, pairs = torch.randn(8, 16), []
    split = [iso.shard(x.to("jax"), mesh, spec) for spec in SPECS]
    transforms = (
        torch.fft.fft,
        torch.fft.rfft2,
        torch.fft.hfft2,
        torch.fft.irfftn,
        lambda x: torch.fft.rfft(x, dim=0),
        lambda x: torch.fft.hfft2(x, s=(4, 6)),
    )
    for number, transform in enumerate(transforms):
        pairs.append((transform(split[number % 4]), transform(x)))
    for got, want in pairs:
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


def test_the_result_can_be_split_again(mesh):
    x = torch.randn(8, 16)
    got = torch.fft.fft(iso.shard(x.to("jax"), mesh, P(None, "y")))
    xs.mark_sharding(got, mesh, (None, "y"))
    xs.sync()
    assert got.partition_spec == P(None, "y")
    torch.testing.assert_close(got.cpu(), torch.fft.fft(x), rtol=1e-4, atol=1e-4)


def test_running_reductions_of_the_same_array(mesh):
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) + 1

    def program(x):
        sums, products = x.cumsum(0), x.cumprod(0)
        extremes = [*x.cummin(0), *x.cummax(0), *(-x).cummax(1), *(-x).cummin(1)]
        return [sums, products, *extremes, x.logcumsumexp(0), x.cumsum(1), *x.mode(0)]

    specs = P(("x", "y")), P("x", "y")
    found = [program(iso.shard(x.to("jax"), mesh, spec)) for spec in specs]
    xs.sync()
    for got in found:
        for one, other in zip(got, program(x), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
