"""One block of a page, run twice: as JAX writes it, and as we do.

A block is a function of `Words`: it lays arrays out with `by.put` and `by.move`, and takes its
functions from `by.function(of arrays, of tensors)`. With `JAX` that is plain JAX. With `OURS` it is
`iso.shard`, `iso.reshard`, and a torch function as a JAX one. With `TENSORS` the torch function
gets tensors over the same buffers, and its result goes back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import isoshard as iso

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Words:
    """How a block is spelled.

    Attributes:
        put: lays out what has no layout yet.
        move: changes a layout.
        function: of a function of arrays and the like function of tensors, the one to call; with
            `out_sharding` its result lies so.
    """

    put: Function
    move: Function
    function: Function


def _of_arrays(of_arrays: Function, of_tensors: Function, out_sharding: Any = None) -> Function:
    if out_sharding is None:
        return of_arrays
    return functools.partial(of_arrays, out_sharding=out_sharding)


def _of_tensors(of_arrays: Function, of_tensors: Function, out_sharding: Any = None) -> Function:
    if out_sharding is None:
        return iso.jax_function(of_tensors)
    return iso.jax_function(of_tensors, out_sharding=out_sharding)


def _through_tensors(
    of_arrays: Function, of_tensors: Function, out_sharding: Any = None
) -> Function:
    def call(*arrays: Any) -> Any:
        result = of_tensors(*jax.tree.map(iso.to_torch, arrays))
        if out_sharding is not None:
            result = iso.shard(result, out_sharding)
        return jax.tree.map(iso.to_jax, result, is_leaf=lambda x: isinstance(x, torch.Tensor))

    return call


JAX = Words(jax.device_put, jax.reshard, _of_arrays)
OURS = Words(iso.shard, iso.reshard, _of_tensors)
TENSORS = Words(iso.shard, iso.reshard, _through_tensors)


def refused(match: str) -> Any:
    """Expect JAX's error of a layout that is open; its class has no public name."""
    return pytest.raises(Exception, match=match, check=_is_of_types)


def _is_of_types(error: BaseException) -> bool:
    return type(error).__name__ == "ShardingTypeError"


def alike(got: Any, want: Any) -> None:
    """Same values, dtypes, types, meshes and layouts; what is no array is equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(other, jax.Array):
            assert one == other
            continue
        assert jax.typeof(one) == jax.typeof(other)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), one.sharding
        assert one.sharding.memory_kind == other.sharding.memory_kind
        mine, theirs = (getattr(x.sharding, "mesh", None) for x in (one, other))
        assert mine == theirs
        for piece, their_piece in zip(
            one.addressable_shards, other.addressable_shards, strict=True
        ):
            assert piece.device == their_piece.device
            np.testing.assert_allclose(piece.data, their_piece.data, rtol=2e-6, atol=1e-6)


def table(*shape: int, first: int = 0) -> jax.Array:
    """Small numbers in float32, whole ones: sums of their products are exact."""
    size = int(np.prod(shape))
    return jax.numpy.asarray((np.arange(size, dtype=np.float32) * 7 + first) % 11 - 4).reshape(
        shape
    )
