"""What an array tells of how it lies."""

import jax
import numpy as np
from jax.sharding import AxisType

import isoshard as iso
from isoshard import P
from isoshard.core.domain.blocks.known_shardings import block_sizes, sharding_of
from isoshard.core.domain.windows.halo import halo_exchange
from isoshard.core.layout.uneven import padded_of


def both(**types):
    """An array over four devices, and one with padding around it."""
    mesh = iso.make_mesh((4,), ("x",), **types)
    array = iso.shard(np.arange(16, dtype=np.float32).reshape(8, 2), mesh, P("x"))
    return array, iso.UnevenArray(array, (5, 2), ((2, 0, 1, 2), None))


def test_traced_values_tell_what_they_know():
    array, uneven = both(axis_types=AxisType.Auto)  # a type tells, and these have none
    told = []

    def note(x, u):
        told.append((sharding_of(x), sharding_of(u)))
        return x.sum() + padded_of(u).sum()

    jax.grad(note)(array, uneven)
    jax.jit(note)(array, uneven)
    (inside_grad, of_uneven), (inside_jit, still) = told
    assert inside_grad.spec == of_uneven.spec == still.spec == P("x") and inside_jit is None


def test_gradients_outside_jit_need_not_be_told():
    array, uneven = both()
    for x in (array, uneven):
        with jax.set_mesh(array.sharding.mesh):
            found = jax.grad(lambda x: (padded_of(halo_exchange(x, 1, 0)) ** 2).sum())(x)
        assert padded_of(found).sharding.is_equivalent_to(array.sharding, 2)
    edges = np.array([1, 2, 2, 2, 2, 2, 2, 1])  # all rows stand in a halo too, but the outermost
    with jax.set_mesh(array.sharding.mesh):
        found = jax.grad(lambda x: halo_exchange(x, 1, 0).sum())(array)
    assert np.asarray(found)[:, 0].tolist() == edges.tolist()


def test_blocks_have_to_fit():
    faults = []
    assert block_sizes("axis 0", 8, 2, (3, 1), faults) == (3, 1) and not faults
    block_sizes("axis 0", 7, 2, None, faults)
    block_sizes("axis 1", 8, 4, (3, 1), faults)
    assert faults[0].startswith("axis 0 has size 7, which 2 shards do not divide: pad it")
    assert faults[1] == "axis 1 has 2 blocks, and 4 shards"
