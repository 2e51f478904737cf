"""Zigzag order and back, along any axis, and which parts of a sequence move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import collectives
from isoshard.core.errors import SpecError, UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.device_put import shard
from isoshard.domain.attention import unzigzag, zigzag
from isoshard.domain.attention.positions import Positions


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_order(devices):
    mesh = make_mesh((devices,), ("s",))
    length = 6 * devices
    x = shard(np.arange(length), mesh, ("s",))
    line = Positions(length, devices, zigzag=True)

    @jax.jit
    def there_and_back(x):
        found = zigzag(x, mesh=mesh, axis="s", dim=0)
        positions = line.positions(jnp.arange(length))
        return found, positions, unzigzag(found, mesh=mesh, axis="s", dim=-1)

    found, positions, back = there_and_back(x)
    parts = np.arange(length).reshape(2 * devices, 3)
    wanted = [[parts[i], parts[2 * devices - 1 - i]] for i in range(devices)]
    np.testing.assert_array_equal(found, np.ravel(wanted))
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(back, x)


def test_moves_half_a_shard_twice_and_leaves_other_axes(mesh):
    x = shard(np.arange(192, dtype=np.float32).reshape(2, 3, 32), mesh, ("x", None, "y"))
    function = functools.partial(zigzag, mesh=mesh, axis="y", dim=2)
    text = jax.jit(function).lower(x).compile().as_text()
    assert collectives.summarize(text) == {"collective-permute": (2, x.nbytes // 8)}
    assert function(x).sharding.is_equivalent_to(x.sharding, 3)


def test_gradient_goes_back():
    mesh = make_mesh((4,), ("s",))
    weight = jnp.arange(16.0)
    slope = jax.jit(jax.grad(lambda x: (zigzag(x, mesh=mesh, axis="s", dim=0) * weight).sum()))
    with jax.set_mesh(mesh):
        found = slope(jnp.zeros(16))
    np.testing.assert_array_equal(found, unzigzag(weight, mesh=mesh, axis="s", dim=0))


def test_mistakes(mesh):
    with pytest.raises(UnevenError, match=r"in 8 equal slices, .* \(1, 12\) .* Pad it to 16"):
        zigzag(jnp.zeros((1, 12)), mesh=mesh, axis="y")
    with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
        unzigzag(jnp.zeros((1, 16)), mesh=mesh, axis="z")
    with pytest.raises(SpecError, match="axis names the mesh axes that split the sequence"):
        zigzag(jnp.zeros((1, 16)), mesh=mesh, axis=())
    with pytest.raises(ValueError, match=r"no axis 2 in an array of shape \(1, 16\)"):
        zigzag(jnp.zeros((1, 16)), mesh=mesh, axis="y", dim=2)
