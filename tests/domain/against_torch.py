"""Calls on shards and on a single device in torch's float64, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_put import shard

from .blocks import grown, in_blocks, out_of_blocks

SPLITS = {"even": (4, 4, 4, 4), "chunk": (5, 5, 5, 3), "any": (5, 2, 7, 4), "empty": (0, 3, 9, 6)}


def packed(x, axis, sizes, mesh, spec, padding=np.nan):
    """The shards of an array, with something in the padding that must not be read."""
    if len(set(sizes)) == 1:
        return shard(x, mesh, spec)
    return in_blocks(x, mesh, spec, [sizes if n == axis else None for n in range(x.ndim)], padding)


def like(u, values):
    """The cotangent of a result; not a number where the result has padding."""
    if not isinstance(u, UnevenArray):
        return values
    return UnevenArray(jnp.asarray(grown(values, u.sizes)), u.shape, u.sizes, u.layout)


def check(rows, mesh):
    """Compare results and every gradient of some calls, which are one program in each direction.

    Args:
        rows: name -> the function on shards, that on tensors, the array, its other operands, and
            the axis, the sizes and the spec of its blocks.
        mesh: of all.

    Returns:
        Name -> the result.
    """
    given, wanted, cotangents = {}, {}, {}
    for name, (_, theirs, x, operands, axis, sizes, spec) in rows.items():
        tensors = [torch.tensor(a, requires_grad=True) for a in (x, *operands)]
        expected = theirs(*tensors)
        cotangents[name] = np.random.default_rng(7).normal(size=expected.shape)
        expected.backward(torch.tensor(cotangents[name]))
        wanted[name] = expected.detach().numpy(), [tensor.grad.numpy() for tensor in tensors]
        given[name] = packed(x, axis, sizes, mesh, spec), *operands

    @jax.jit
    def forward(given):
        found = {}
        for name, (ours, *_, spec) in rows.items():
            function = functools.partial(ours, mesh=mesh, spec=spec)
            found[name] = jax.vjp(function, *given[name])
        return found

    @jax.jit
    def backward(pulls, cotangents):
        return {name: pull(cotangents[name]) for name, pull in pulls.items()}

    found = forward(given)
    outs, pulls = ({name: pair[n] for name, pair in found.items()} for n in (0, 1))
    slopes = backward(pulls, {name: like(out, cotangents[name]) for name, out in outs.items()})
    for name, (want, gradients) in wanted.items():
        out, u, close = outs[name], given[name][0], {"rtol": 1e-9, "atol": 1e-9, "err_msg": name}
        assert isinstance(out, UnevenArray) or not isinstance(u, UnevenArray), name
        np.testing.assert_allclose(out_of_blocks(out), want, **close)
        for got, right in zip(slopes[name], gradients, strict=True):
            np.testing.assert_allclose(out_of_blocks(got), right, **close)
        assert slopes[name][0].sharding.is_equivalent_to(u.sharding, len(u.shape)), name
    return outs
