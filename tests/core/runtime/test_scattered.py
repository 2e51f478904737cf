"""Numbers scattered in memory, against the memory's owners."""

from __future__ import annotations

import numpy as np
import pytest

from isoshard.core.runtime.scattered import Scattered, separate


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_numbers_are_read_and_written_where_they_lie(dtype):
    rng = np.random.default_rng(0)
    owners = [rng.integers(0, 100, size=rng.integers(1, 5000)).astype(dtype) for _ in range(60)]
    before = [owner.copy() for owner in owners]
    items = [rng.integers(owner.size) for owner in owners]
    pairs = list(zip(owners, items, strict=True))
    numbers = Scattered([o.ctypes.data + n * o.itemsize for o, n in pairs], dtype)
    assert numbers.read().dtype == dtype
    assert numbers.read().tolist() == [owner[item] for owner, item in pairs]

    numbers.write(range(60))
    for n, (owner, item) in enumerate(pairs):
        before[n][item] = n
        np.testing.assert_array_equal(owner, before[n])


def test_what_lies_between_may_change_meanwhile():
    owner = np.zeros(200_000)
    ends = Scattered([owner.ctypes.data, owner.ctypes.data + owner.nbytes - 8], np.float64)
    between = [np.zeros(3) for _ in range(100)]  # wherever the index of a write would lie
    for n in range(100):
        ends.write([n, n + 1.0])
        between[n][:] = owner[100_000] = n
        assert ends.read().tolist() == [n, n + 1.0]
        assert owner[100_000] == n
    assert [one[0] for one in between] == list(range(100))


def test_what_numpy_goes_by_lies_outside_of_the_span():
    index = np.arange(3)
    first, _ = separate(index, np.dtype(np.float32), range(0))
    here = first.ctypes.data
    del first
    for span in (range(here - 8192, here + 8192), range(here, here + 1), range(here + 1, here + 4)):
        again, numbers = separate(index, np.dtype(np.float32), span)
        assert again.tolist() == [0, 1, 2] and numbers.shape == (3,)
        for one in (again, numbers):
            assert one.ctypes.data >= span.stop or one.ctypes.data + one.nbytes <= span.start
