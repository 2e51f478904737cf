"""Files are of one size, whatever the blocks, and each is written at once."""

import itertools

import numpy as np
import pytest

from isoshard.core.checkpoint.chunk_grid import Grid, file_size
from isoshard.core.checkpoint.file_writes import by_file
from isoshard.core.checkpoint.stored_shards import StoredShard

VALUES = np.arange(18 * 10).reshape(18, 10)


def cut(rows, columns):
    ends = [[0, *itertools.accumulate(sizes)] for sizes in (rows, columns)]
    for row, column in itertools.product(*map(itertools.pairwise, ends)):
        index = (slice(*row), slice(*column))
        if VALUES[index].size:
            yield StoredShard(index, VALUES[index])


@pytest.mark.parametrize("rows", [(5, 2, 7, 4), (0, 3, 9, 6)], ids=str)
@pytest.mark.parametrize("files", [(5, 10), (4, 3), (1, 1), (7, 4)], ids=str)
def test_every_file_comes_whole_and_once(files, rows):
    found = np.zeros(VALUES.shape, int)
    for piece in by_file([*cut(rows, (4, 0, 6))], Grid(files, files), VALUES.shape):
        assert (piece.host == VALUES[piece.index]).all()
        found[piece.index] += 1
        for place, size, extent in zip(piece.index, files, VALUES.shape, strict=True):
            assert place.start % size == 0
            assert place.stop % size == 0 or place.stop == extent
    assert (found == 1).all()


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        ((5, 5, 5, 3), 5),
        ((2, 2, 1, 0), 2),
        ((16, 4, 20, 8), 4),
        ((0, 18, 0, 0), 18),
        ((0, 0, 7), 7),
    ],
)
def test_files_begin_where_blocks_do(sizes, size):
    assert file_size(sizes) == size


@pytest.mark.parametrize("sizes", [(5, 2, 7, 4), (501, 502, 700, 333), (1, 99_999, 1, 1)])
def test_or_are_about_as_many(sizes):
    size = file_size(sizes)
    assert len(sizes) / 1.2 <= sum(sizes) / size <= len(sizes)
    assert size < 16 or size % 2 == 0
