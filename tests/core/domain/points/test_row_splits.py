"""How the rows of an array lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.domain.points.row_splits import entries, read_rows


def test_axes_of_size_one_split_nothing():
    mesh = iso.make_mesh((1, 4), ("x", "y"))
    array = iso.shard(np.zeros((8, 2), np.float32), mesh, P(("x", "y")))
    faults = []
    rows = read_rows("a", array, mesh, P(("x", "y")), faults)
    assert rows.axes == ("y",) and rows.sizes == (2, 2, 2, 2) and not faults
    assert rows.spec == P("y") and rows.starts().tolist() == [0, 2, 4, 6]
    assert entries(array) == (("y",), ())


def test_results_take_the_form_of_what_was_read():
    mesh = iso.make_mesh((4,), ("x",))
    padded = iso.shard(np.zeros((8, 2), np.float32), mesh, P("x"))
    uneven = iso.UnevenArray(padded, (5, 2), ((2, 0, 1, 2), None))
    rows = read_rows("a", uneven, mesh, None, [])
    assert rows.count == 5 and rows.starts().tolist() == [0, 2, 2, 3]
    made = rows.like(jnp.zeros((8, 3, 4)))
    assert made.shape == (5, 3, 4) and made.sizes == ((2, 0, 1, 2), None, None)
    assert read_rows("a", padded, mesh, None, []).like(padded) is padded


@pytest.mark.parametrize(
    ("spec", "told", "fault"),
    [
        (P("x"), P(None), "are split over \\('x',\\), and axes= says \\(\\): leave axes= out"),
        (P(), P("x"), "are split over \\(\\), and axes= says \\('x',\\)"),
    ],
)
def test_what_is_said_has_to_agree(spec, told, fault):
    mesh = iso.make_mesh((4,), ("x",))
    faults = []
    read_rows("a", iso.shard(np.zeros((8, 2), np.float32), mesh, spec), mesh, told, faults)
    with pytest.raises(iso.ShardingError, match=fault):
        raise iso.ShardingError(*faults)


def test_blocks_and_rows_have_to_fit():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    array = iso.shard(np.zeros((8, 2), np.float32), mesh, P("y"))
    two = iso.UnevenArray(array, (5, 2), ((2, 3), None))
    faults = []
    read_rows("a", two, mesh, None, faults)
    jax.eval_shape(lambda x: read_rows("b", x, mesh, P("x"), faults).count, jnp.zeros((7, 2)))
    read_rows("c", array, iso.make_mesh((8,), ("z",)), None, faults)
    assert len(faults) == 3
    assert "axis 0 of a has 2 blocks, and 4 shards" in faults[0]
    assert "axis 0 of b has size 7, which 2 shards do not divide: pad it" in faults[1]
    assert "not on the mesh 'z' (8): lay them out there, iso.shard(c, mesh, spec)" in faults[2]
