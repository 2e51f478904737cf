import jax
import numpy as np
import pytest
import torch

from isoshard.core.domain.windows.running_scan import cummax, cummin, cumprod, cumsum
from isoshard.core.errors import ShardingError
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("reverse", [False, True])
def test_along_the_split_axis(split, reverse, mesh, x64):
    check(
        lambda x, **layout: cumsum(x, -1, reverse=reverse, **layout),
        lambda x: x.flip(2).cumsum(2).flip(2) if reverse else x.cumsum(2),
        RNG.normal(size=(2, 2, sum(SPLITS[split]))),
        (),
        2,
        SPLITS[split],
        mesh,
        SPEC,
    )


@pytest.mark.parametrize("split", ["any", "empty"])
@pytest.mark.parametrize("running", [cumprod, cummax, cummin])
def test_products_and_extremes(running, split, mesh, x64):
    theirs = getattr(torch, running.__name__)
    check(
        lambda x, **layout: running(x, 2, **layout),
        lambda x: theirs(x, 2) if running is cumprod else theirs(x, 2)[0],
        RNG.normal(size=(2, 2, sum(SPLITS[split]))),
        (),
        2,
        SPLITS[split],
        mesh,
        SPEC,
    )


def test_extremes_of_integers(mesh):
    x = RNG.integers(-9, 9, (2, 2, 16)).astype(np.int32)
    found = cummin(shard(x, mesh, SPEC), 2, reverse=True)
    np.testing.assert_array_equal(found, np.minimum.accumulate(x[..., ::-1], 2)[..., ::-1])


def test_along_a_whole_axis(mesh, x64):
    x = RNG.normal(size=(2, 3, 18))
    check(lambda x, **layout: cumsum(x, 1, **layout), lambda x: torch.cumsum(x, 1), x, (), 2, SPLITS["any"], mesh, SPEC)  # fmt: skip  # noqa: E501


def test_the_rows_stay(mesh):
    x = shard(np.ones((2, 2, 64), np.float32), mesh, SPEC)
    program = jax.jit(lambda x: cumsum(x, 2, mesh=mesh, spec=SPEC))
    text = program.lower(x).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert gathers
    assert all("f32[1,2,4]" in line for line in gathers)


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), bool), mesh, SPEC)
    with pytest.raises(ShardingError, match=r"axis 3 is none of the 3 axes; x is of bool"):
        cumsum(x, 3)
