"""What devices hold without padding: every valid element once, wherever it lies."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.layout.valid_elements import local_elements, valid_slices

PADDED = np.full((12, 8), np.nan, np.float32)
SIZES = ((3, 0, 1, 2), (4, 1))
ROWS = [0, 1, 2, 6, 9, 10]
COLUMNS = [0, 1, 2, 3, 4]
VALUES = np.arange(30, dtype=np.float32).reshape(6, 5)
PADDED[np.ix_(ROWS, COLUMNS)] = VALUES


@pytest.mark.parametrize(
    "spec", [P("x", "y"), P("x"), P(None, "y"), P(), P("y", "x"), P(None, ("y", "x"))], ids=str
)
def test_every_element_once_per_replica(spec):
    mesh = make_mesh((4, 2), ("x", "y"))
    array = jax.device_put(PADDED, NamedSharding(mesh, spec))
    found = np.zeros(VALUES.shape)
    for one in local_elements(UnevenArray(array, VALUES.shape, SIZES)):
        piece = np.asarray(one.buffer)[one.valid.inside]
        assert piece.size and (piece == VALUES[one.valid.index]).all()
        found[one.valid.index] += one.replica_id == 0
        assert one.buffer.devices() == {one.device}
    assert (found == 1).all()


def test_plain_arrays_are_held_as_they_are():
    array = jax.device_put(VALUES, NamedSharding(make_mesh((2, 4), ("x", "y")), P("x")))
    held = local_elements(array)
    assert [one.valid.index[0].start for one in held] == [0] * 4 + [3] * 4
    assert [one.replica_id for one in held] == [0, 1, 2, 3] * 2
    assert all(one.valid.inside == (slice(0, 3), slice(0, 5)) for one in held)


def test_blocks_without_elements():
    assert valid_slices((slice(0, 0),), (0,), ((0, 0),)) == []
    assert [part.index for part in valid_slices((slice(None),), (0,), (None,))] == [(slice(0, 0),)]
    assert [part.inside for part in valid_slices((), (), ())] == [()]
