"""One call on shards and one on a single device in torch's float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.place import shard

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
        return jnp.asarray(values)
    return UnevenArray(jnp.asarray(grown(values, u.sizes)), u.shape, u.sizes, u.layout)


def check(ours, theirs, x, operands, axis, sizes, mesh, spec):
    """Compare results and every gradient; give the result."""
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, *operands)]
    expected = theirs(*tensors)
    cotangent = np.random.default_rng(7).normal(size=expected.shape)
    expected.backward(torch.tensor(cotangent))

    def function(*arguments):
        return ours(*arguments, mesh=mesh, spec=spec)

    @jax.jit
    def both(cotangent, *arguments):
        out, pull = jax.vjp(function, *arguments)
        return out, pull(cotangent)

    u = packed(x, axis, sizes, mesh, spec)
    form = jax.eval_shape(function, u, *operands)
    out, gradients = both(like(form, cotangent), u, *operands)
    assert isinstance(out, UnevenArray) or not isinstance(u, UnevenArray)
    np.testing.assert_allclose(out_of_blocks(out), expected.detach().numpy(), rtol=1e-9, atol=1e-9)
    for got, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(out_of_blocks(got), tensor.grad.numpy(), rtol=1e-9, atol=1e-9)
    assert gradients[0].sharding.is_equivalent_to(u.sharding, x.ndim)
    return out
