"""Arrays in blocks for the tests: with NaN for padding, and taken out of it again by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import isoshard as iso
from isoshard import UnevenArray


def places(extent, sizes):
    """Where the elements of an axis of `extent` with padding stand, one by one."""
    block = extent // len(sizes)
    return [at * block + i for at, size in enumerate(sizes) for i in range(size)]


def grown(x, sizes, padding=np.nan):
    """Blocks of equal sizes, with `padding` where nothing is valid."""
    padded = np.asarray(x)
    for axis, own in enumerate(sizes):
        if own is not None:
            shape = list(padded.shape)
            shape[axis] = max(own) * len(own)
            wide = np.full(shape, padding, padded.dtype)
            wide[(slice(None),) * axis + (places(shape[axis], own),)] = padded
            padded = wide
    return padded


def in_blocks(x, mesh, spec, sizes, padding=np.nan):
    """Lay out, with `padding` where nothing is valid."""
    return UnevenArray(iso.shard(grown(x, sizes, padding), mesh, spec), x.shape, sizes)


def out_of_blocks(u):
    """The valid elements, in NumPy; global arrays as they are."""
    if not isinstance(u, UnevenArray):
        return np.asarray(u)
    found = np.asarray(u.array)
    for axis, own in enumerate(u.sizes):
        if own is not None:
            found = np.take(found, places(found.shape[axis], own), axis)
    return found


def padding_of(u):
    """What stands in the padding."""
    return np.asarray(u.array)[~np.asarray(u.mask())]


def weighted(results):
    """One number of all inexact results, different for each element of each."""
    total = 0.0
    for number, leaf in enumerate(jax.tree.leaves(results)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            weights = np.cos(np.arange(leaf.size) + number).reshape(leaf.shape)
            total += jnp.sum(leaf * weights.astype(leaf.dtype))
    return total


def with_loss(function):
    """A function that gives the weighted sum of its results before them."""

    def run(*arguments):
        results = function(*arguments)
        return weighted(results), results

    return run


def dense(function, *arguments):
    """On one device in float64: the results, and the gradients of their weighted sum."""

    @jax.jit
    def both(*arguments):
        numbers = tuple(range(len(arguments)))
        loss = jax.value_and_grad(with_loss(function), argnums=numbers, has_aux=True)
        (_, results), gradients = loss(*arguments)
        return results, gradients

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
        return jax.tree.map(np.asarray, both(*wide))


def in_torch(function, *arguments):
    """On one device in torch's float64: the results, and the gradients of their weighted sum."""
    tensors = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in arguments]
    results = function(*tensors)
    total = 0.0
    for number, leaf in enumerate(jax.tree.leaves(results)):
        weights = np.cos(np.arange(leaf.numel()) + number).reshape(leaf.shape)
        total += (leaf * torch.tensor(weights)).sum()
    total.backward()
    return jax.tree.map(lambda x: x.detach().numpy(), results), tuple(x.grad for x in tensors)
