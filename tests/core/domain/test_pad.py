import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.domain.windows.pad import pad, roll
from isoshard.core.errors import ShardingError
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check, packed, whole

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")
NAMES = {"zero": "constant", "wrap": "circular", "edge": "replicate", "reflect": "reflect"}


@pytest.mark.parametrize("mode", NAMES)
@pytest.mark.parametrize("split", ["even", "any", "empty"])
def test_modes(mode, split, mesh, x64):
    sizes = SPLITS[split]
    shape = (2, 1, sum(sizes), 4)
    out = check(
        lambda x, **layout: pad(x, {2: (7, 5), -1: (1, 2)}, mode, **layout),
        lambda x: F.pad(x, (1, 2, 7, 5), NAMES[mode]),
        RNG.normal(size=shape),
        (),
        2,
        sizes,
        mesh,
        SPEC,
    )
    assert sum(out.shape) - sum(shape) == 15


@pytest.mark.parametrize("mode", ["wrap", "reflect", "symmetric"])
def test_pads_wider_than_the_axis_go_on_as_in_numpy(mode, mesh, x64):
    x = RNG.normal(size=18)
    u = packed(x, 0, SPLITS["any"], mesh, ("y",))
    np.testing.assert_array_equal(whole(pad(u, [(40, 23)], mode)), np.pad(x, (40, 23), mode))


def test_rows_are_taken_away(mesh, x64):
    check(
        lambda x, **layout: pad(x, {2: (-6, 2)}, value=3, **layout),
        lambda x: F.pad(x, (-6, 2), value=3),
        RNG.normal(size=(2, 1, 18)),
        (),
        2,
        SPLITS["any"],
        mesh,
        SPEC,
    )


@pytest.mark.parametrize("split", ["even", "any", "empty"])
@pytest.mark.parametrize("shift", [3, -20])
def test_roll(shift, split, mesh, x64):
    sizes = SPLITS[split]
    out = check(
        lambda x, **layout: roll(x, shift, 2, **layout),
        lambda x: torch.roll(x, shift, 2),
        RNG.normal(size=(2, 1, sum(sizes))),
        (),
        2,
        sizes,
        mesh,
        SPEC,
    )
    assert split == "even" or out.sizes[2] == sizes


def test_nothing_to_pad_gives_the_same_array(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    assert pad(x, [(0, 0)] * 3) is x


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    with pytest.raises(ShardingError, match=r"axis 3 is none of the 3 axes; widths 1 of axis 0"):
        pad(x, {3: (1, 1), 0: 1})
    with pytest.raises(ShardingError, match=r"mode 'constant' is none of 'zero'"):
        pad(x, {0: (1, 1)}, "constant")
    with pytest.raises(ShardingError, match=r"axis 2 of size 16 gives no outputs"):
        pad(x, {2: (-8, -8)})
    with pytest.raises(ShardingError, match=r"shift 0.5 is no whole number; axis 4 is none"):
        roll(x, 0.5, 4)
