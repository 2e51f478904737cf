import numpy as np
import pytest

from isoshard.core.domain.windows.window_arguments import Faults, is_whole
from isoshard.core.errors import ShardingError


def test_whole_numbers():
    assert is_whole(np.int64(3))
    assert not is_whole(True)
    assert not is_whole(2.0)


def test_one_number_is_for_all_axes():
    assert Faults("f").per_axis("stride", np.int32(2), 3, least=1) == (2, 2, 2)


def test_all_faults_come_in_one_error():
    faults = Faults("f")
    faults.raise_any()
    faults.per_axis("stride", (1, 2, 3), 2, least=1)
    faults.unless(True, "not this")
    faults.unless(False, "but this")
    with pytest.raises(
        ShardingError, match=r"(?m)^f: stride \(1, 2, 3\) is no whole .*; but this$"
    ):
        faults.raise_any()
