"""Positions and padding of every order, against lists; and the bits of dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.domain.attention.dropout import keep
from isoshard.core.domain.attention.positions import Positions


@pytest.mark.parametrize("sizes", [(5, 2, 7, 4), (0, 3, 9, 6), (4, 4, 4, 4), (0, 0, 0, 1)])
def test_uneven_positions(sizes):
    block = max(sizes)
    line = Positions(block * len(sizes), len(sizes), sizes=sizes)
    places = jnp.arange(line.length)
    valid = np.asarray(line.valid(places))
    np.testing.assert_array_equal(valid.reshape(len(sizes), block).sum(1), sizes)
    positions = np.asarray(line.positions(places))[valid]
    np.testing.assert_array_equal(positions, np.arange(sum(sizes)))


def test_a_line_in_order():
    line = Positions(12, 4)
    assert line.block == 3
    np.testing.assert_array_equal(line.positions(jnp.arange(3, 9)), np.arange(3, 9))
    assert line.valid(jnp.arange(12)).all()


def test_bits_depend_on_places_alone():
    numbers = [jnp.arange(n) for n in (3, 2, 40, 50)]
    whole = np.asarray(keep(jax.random.key(0), 0.25, *numbers))
    assert abs(whole.mean() - 0.75) < 0.01
    for axis in range(4):  # no sample, head, query or key repeats another
        first, second = (whole.take(i, axis) for i in (0, 1))
        assert (first != second).mean() > 0.25
    part = keep(jax.random.key(0), 0.25, *[n[1::2] for n in numbers])
    np.testing.assert_array_equal(part, whole[1::2, 1::2, 1::2, 1::2])
    assert keep(jax.random.key(0), 0.0, *numbers).all()
    assert (np.asarray(keep(jax.random.key(1), 0.25, *numbers)) != whole).mean() > 0.25
