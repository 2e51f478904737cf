"""Fourier transforms of arrays on a mesh, against torch in float64, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from benchmarks import collectives
from isoshard import P, ShardingError
from isoshard.core.layout.axis_types import constrain

from .blocks import in_blocks, in_torch, out_of_blocks, with_loss


def transforms(module, axes, norm, odd):
    """Real and imaginary parts of transforms of two real arrays, by `iso.domain` or torch."""

    def call(kind, x, **more):
        if module is iso.domain:
            return getattr(module, kind)(x, axes, norm=norm, **more)
        sizes = [x.shape[axis] for axis in axes]
        given = {"s": (*sizes[:-1], more["length"])} if more else {}
        return getattr(module, f"{kind}n")(x, dim=axes, norm=norm, **given)

    def run(x, y):
        found = [call("irfft", x + 1j * y, length=2 * x.shape[axes[-1]] - 2 + odd)]
        for kind in ("fft", "ifft", "rfft"):
            one = call(kind, x if kind == "rfft" else x + 1j * y)
            found += [one.real, one.imag]
        return found

    return run


def checked(mesh, spec, shape, axes, norm="backward", odd=0):
    """Compare results and gradients; gives the collectives of both programs together."""
    given = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    placed = [iso.shard(x, mesh, spec) for x in given]
    layout = placed[0].sharding
    ours = transforms(iso.domain, axes, norm, odd)

    @jax.jit
    def both(*arrays):
        loss = jax.grad(with_loss(ours), argnums=(0, 1), has_aux=True)
        slopes, results = loss(*arrays)
        return results, [constrain(x, layout) for x in slopes]

    program = both.lower(*placed).compile()
    results, slopes = program(*placed)
    wanted, gradients = in_torch(transforms(torch.fft, axes, norm, odd), *given)
    for have, right in zip(results, wanted, strict=True):
        np.testing.assert_allclose(have, right, rtol=1e-4, atol=1e-4)
    for have, right in zip(slopes, gradients, strict=True):
        np.testing.assert_allclose(have, right, rtol=1e-4, atol=2e-4)
        assert have.sharding.is_equivalent_to(layout, have.ndim)
    if all(layout.spec[axis] is None for axis in axes if axis < len(layout.spec)):
        assert all(x.sharding.is_equivalent_to(layout, x.ndim) for x in results)
    return collectives.summarize(program.as_text())


@pytest.mark.parametrize(
    ("grid", "spec", "shape", "axes", "norm", "odd"),
    [
        ((2, 4), P("x", "y"), (2, 4, 6, 5), (2, 3), "forward", 1),
    ],
)
def test_along_whole_axes_nothing_is_sent(grid, spec, shape, axes, norm, odd):
    """In no direction, and everything is sharded as the operand does."""
    mesh = iso.make_mesh(grid, ("x", "y")[: len(grid)])
    assert checked(mesh, spec, shape, axes, norm, odd) == {}


@pytest.mark.parametrize(
    ("grid", "spec", "shape", "axes"),
    [
        ((2, 4), P(None, ("x", "y")), (3, 16, 5), (1, 2)),  # lines that 8 does not divide
    ],
)
def test_along_split_axes_lines_are_exchanged(grid, spec, shape, axes):
    mesh = iso.make_mesh(grid, ("x", "y")[: len(grid)])
    sent = checked(mesh, spec, shape, axes, "ortho")
    assert set(sent) == {"all-to-all"}


@pytest.mark.parametrize(
    ("spec", "shape", "axes"),
    [
        (P(None, "x"), (6, 8), (0, 1)),  # half a spectrum of a split axis
        (P("x", None), (4, 1), (0, 1)),  # fewer lines than devices, and a single element
    ],
)
def test_wherever_the_axes_lie(spec, shape, axes):
    checked(iso.make_mesh((4,), ("x",)), spec, shape, axes, odd=1)


def test_lengths_that_do_not_divide():
    """As inside a program: the compiler pads, and nothing of it is read."""
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=AxisType.Auto)  # others divide
    layout = NamedSharding(mesh, P("x", "y"))
    x = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)

    @jax.jit
    def run(x):
        x = jax.lax.with_sharding_constraint(x * 2, layout)
        return [(iso.domain.fft(x, axes), iso.domain.rfft(x, axes)) for axes in every]

    every = ((0,), (1,), (0, 1))
    for axes, (found, half) in zip(every, run(x), strict=True):
        np.testing.assert_allclose(found, np.fft.fftn(2 * x, axes=axes), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(half, np.fft.rfftn(2 * x, axes=axes), rtol=1e-4, atol=1e-4)


ROWS = (5, 2, 7, 4)


def test_blocks_of_unequal_sizes(mesh):
    """And a batch that is split evenly; padding of NaN is not read."""
    axes = (1, 3)
    sizes = (None, None, ROWS, None)
    x = np.random.default_rng(0).normal(size=(2, 3, 18, 5)).astype(np.float32)
    u = in_blocks(x, mesh, P("x", None, "y"), sizes)

    def loss(u):
        parts = iso.domain.rfft(u, axes)
        return iso.domain.lift(lambda a: (jnp.abs(a) ** 2).sum())(parts)

    @jax.jit
    def run(u):
        back = iso.domain.irfft(iso.domain.rfft(u, axes), axes, length=5)
        return back, jax.grad(loss)(u)

    found = iso.domain.fft(u, axes, norm="ortho")
    assert found.sizes == sizes and found.sharding.spec[2] in ("y", ("y",))
    expected = np.fft.fftn(x, axes=axes, norm="ortho")
    np.testing.assert_allclose(out_of_blocks(found), expected, rtol=1e-4, atol=1e-4)
    with jax.set_mesh(mesh):
        back, slope = run(u)
    np.testing.assert_allclose(out_of_blocks(back), x, rtol=1e-4, atol=1e-4)
    wide = torch.tensor(x.astype(np.float64), requires_grad=True)
    torch.fft.rfftn(wide, dim=axes).abs().square().sum().backward()
    np.testing.assert_allclose(out_of_blocks(slope), wide.grad, rtol=1e-3, atol=1e-3)


def test_blocks_send_nothing_along_whole_axes(mesh):
    u = in_blocks(np.ones((4, 18, 6), np.float32), mesh, P("x", "y"), (None, ROWS, None))

    def back(u, dout):
        out, pull = jax.vjp(lambda u: iso.domain.fft(u), u)
        return out, pull(dout)

    text = jax.jit(back).lower(u, iso.domain.fft(u)).compile().as_text()
    assert collectives.summarize(text) == {}


def test_inside_shard_map_and_on_one_device():
    mesh = iso.make_mesh((4,), ("x",))
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    run = jax.shard_map(iso.domain.fft, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    found = run(iso.shard(x, mesh, P("x")))
    for one in (found, iso.domain.fft(x), jax.jit(iso.domain.fft)(x)):
        np.testing.assert_allclose(one, np.fft.fft(x), rtol=1e-4, atol=1e-4)
    assert iso.domain.fft(np.arange(3)).dtype == jnp.complex64
    assert iso.domain.rfft(jnp.ones(3, jnp.bfloat16)).shape == (2,)


def test_what_does_not_fit():
    x = jnp.ones((3, 2))
    with pytest.raises(ShardingError, match=r"axes \(0, 2\) are none of the 2 axes; norm 'unit'"):
        iso.domain.fft(x, (0, 2), norm="unit")
    with pytest.raises(ShardingError, match=r"axes \(0, -2\) name an axis twice"):
        iso.domain.ifft(x, (0, -2))
    with pytest.raises(ShardingError, match="x is of complex64, take fft"):
        iso.domain.rfft(x * 1j)
    with pytest.raises(ShardingError, match="length 5 is not 2 or 3, of 2 elements"):
        iso.domain.irfft(x, length=5)
    with pytest.raises(ShardingError, match=r"axes \[0\] have no elements"):
        iso.domain.fft(jnp.ones((0, 2)), 0)
