"""Padded arrays with a true shape: what is valid, as pytrees, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from isoshard import P, ShardingError, UnevenArray

SIZES = ((2, 2, 1, 0), None)


@pytest.fixture
def uneven(mesh):
    return UnevenArray(iso.shard(np.ones((8, 6), np.float32), mesh, P("y")), (5, 6), SIZES)


def valid(shape, sizes):
    """The mask, element by element."""
    mask = np.ones(shape, bool)
    for at in np.ndindex(*shape):
        for axis, size in enumerate(sizes):
            if size is not None:
                block = shape[axis] // len(size)
                mask[at] &= at[axis] % block < size[at[axis] // block]
    return mask


@pytest.mark.parametrize(
    ("padded", "shape", "sizes"),
    [
        ((8, 6), (5, 6), SIZES),
        ((4, 6), (4, 5), (None, (3, 2))),
        ((6, 6), (5, 4), ((3, 2), (2, 2, 0))),
        ((4, 4), (4, 4), (None, None)),
        ((8,), (0,), ((0, 0),)),
        ((), (), ()),
    ],
)
def test_the_mask_says_what_is_valid(padded, shape, sizes):
    uneven = UnevenArray(jnp.zeros(padded), shape, sizes)
    want = valid(padded, sizes)
    np.testing.assert_array_equal(uneven.mask(), want)
    np.testing.assert_array_equal(jax.jit(UnevenArray.mask)(uneven), want)
    assert want.sum() == uneven.size and uneven.ndim == len(shape)


def test_the_mask_lies_as_the_array(uneven):
    assert uneven.mask().sharding == uneven.sharding
    assert jax.jit(lambda u: jnp.sum(u.array, where=u.mask()))(uneven) == 30


def test_the_mask_of_sums_still_to_be_taken():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4), ("x", "y"), (AxisType.Explicit,) * 2
    )
    parts = [jax.device_put(np.ones(2, np.float32), d) for d in mesh.devices.flat]
    array = jax.make_array_from_single_device_arrays(
        (4,), NamedSharding(mesh, P("x", unreduced={"y"})), parts
    )
    mask = UnevenArray(array, (3,), ((2, 1),)).mask()
    np.testing.assert_array_equal(mask, [True, True, True, False])
    assert mask.sharding.spec == P("x")


def test_it_is_a_pytree_of_one_leaf(uneven):
    leaves, structure = jax.tree.flatten(uneven)
    assert leaves == [uneven.array]
    again = jax.tree.unflatten(structure, leaves)
    assert (again.array, again.shape, again.sizes) == (uneven.array, (5, 6), SIZES)
    doubled = jax.jit(lambda u: jax.tree.map(lambda x: 2 * x, u))(uneven)
    assert doubled.shape == (5, 6) and doubled.sizes == SIZES
    np.testing.assert_array_equal(doubled.array, 2 * np.ones((8, 6)))
    assert jax.tree.map(lambda x: None, uneven).array is None
    with jax.set_mesh(uneven.array.sharding.mesh):
        gradient = jax.grad(lambda u: jnp.sum(u.array**2, where=u.mask()))(uneven)
    np.testing.assert_array_equal(gradient.array, 2.0 * valid((8, 6), SIZES))


def test_its_words(uneven):
    assert repr(uneven) == (
        "UnevenArray(float32[5,6] in float32[8,6], axis 0 in blocks of 2: 2, 2, 1, 0 valid; "
        f"{P('y')})"
    )
    assert uneven.dtype == np.float32 and iso.UnevenArray is UnevenArray
    assert repr(jax.tree.map(lambda x: "leaf", uneven)).startswith("UnevenArray('leaf', (5, 6)")
    seen = []
    jax.jit(lambda u: seen.append(repr(u)))(uneven)
    assert seen[0].startswith("UnevenArray(float32[5,6] in float32[8,6]")


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((5,), SIZES, "ranks 2, 1 and 2"),
        ((6, 6), SIZES, "axis 0 has 5 valid elements in its blocks, and 6 in the shape"),
        ((5, 5), SIZES, "axis 1 is not padded, and has 6 elements for 5"),
        ((5, 6), ((2, 2, 1), None), "axis 0 has 8 elements, which are no 3 equal blocks"),
        ((5, 6), ((), None), "axis 0 has 8 elements, which are no 0 equal blocks"),
        ((5, 6), ((3, 2, 0, 0), None), r"blocks of 2 elements, of which \[3\] are valid"),
        ((7, 5), SIZES, "axis 0 has 5 valid.*; axis 1 is not padded"),
    ],
)
def test_what_does_not_belong_together(shape, sizes, message):
    with pytest.raises(ShardingError, match=message):
        UnevenArray(jnp.zeros((8, 6)), shape, sizes)


def test_the_layout_is_known_inside_jit(uneven):
    seen = []

    @jax.jit
    def doubled(u):
        seen.append((u.sharding, u.layout))
        return jax.tree.map(lambda x: 2 * x, u)

    found = doubled(uneven)
    assert seen == [(uneven.layout, uneven.layout)] and uneven.layout.spec == P("y")
    assert found.layout == uneven.layout
    with jax.set_mesh(uneven.array.sharding.mesh):
        slopes = jax.grad(lambda u: u.array.sum())(uneven)
    jax.tree.map(lambda a, b: a + b, uneven, slopes)
