import pytest

from isoshard.core.domain.windows.conv import ConvReach
from isoshard.core.domain.windows.pad import ShiftReach
from isoshard.core.domain.windows.resize import ResizeReach
from isoshard.core.domain.windows.window_operators import output_sizes


@pytest.mark.parametrize(
    ("reach", "sizes", "uneven", "outputs"),
    [
        (ConvReach(3, 1, 1, 1, 1), (5, 2, 7, 4), True, (5, 2, 7, 4)),
        (ConvReach(3, 2, 1, 1, 1), (0, 3, 9, 6), True, (0, 2, 4, 3)),
        (ConvReach(3, 1, 1, 0, 0), (4, 4), False, (3, 3)),
        (ConvReach(2, 1, 1, 0, 0), (4, 4), False, (4, 3)),
        (ShiftReach(4, 0), (2, 2), True, (6, 2)),
        (ShiftReach(4, 0), (2, 2), False, (4, 4)),
        (ShiftReach(3, -3, rolled=True), (1, 5), True, (1, 5)),
        (ResizeReach(12, "linear", False, None), (1, 5), True, (2, 10)),
    ],
)
def test_outputs_live_with_their_rows(reach, sizes, uneven, outputs):
    assert output_sizes(reach, sizes, uneven) == outputs
