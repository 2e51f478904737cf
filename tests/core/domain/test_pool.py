import jax
import numpy as np
import pytest
from torch.nn import functional as F

from isoshard.core.domain.windows.pool import avg_pool, max_pool
from isoshard.core.errors import ShardingError
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check, packed, whole

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")

# window, stride, padding, ceil mode
KINDS = {
    "blocks": (2, 2, 0, False),
    "overlapping": (3, 1, 1, False),
    "strided": (3, 2, 1, False),
    "ceil": (4, 3, 1, True),
    "stride beyond window": (2, 5, 1, True),
    "wider than a shard": (9, 2, 4, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["any", "empty"])
def test_max_on_uneven_shards(kind, split, mesh, x64):
    k, s, p, ceil = KINDS[kind]
    check(
        lambda x, **layout: max_pool(x, k, stride=s, padding=p, ceil_mode=ceil, **layout),
        lambda x: F.max_pool1d(x, k, s, p, ceil_mode=ceil),
        RNG.normal(size=(2, 2, 18)),
        (),
        2,
        SPLITS[split],
        mesh,
        SPEC,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real", [False, True])
def test_mean_on_uneven_shards(kind, real, mesh, x64):
    k, s, p, ceil = KINDS[kind]
    numbers = {"ceil_mode": ceil, "count_include_pad": not real}
    check(
        lambda x, **layout: avg_pool(x, (k, 2), stride=(s, 1), padding=(p, 1), **numbers, **layout),
        lambda x: F.avg_pool2d(x, (k, 2), (s, 1), (p, 1), **numbers),
        RNG.normal(size=(2, 2, 18, 3)),
        (),
        2,
        SPLITS["any"],
        mesh,
        SPEC,
    )


@pytest.mark.parametrize("method", ["auto", "windows"])
@pytest.mark.parametrize("ceil", [False, True])
def test_even_shards(method, ceil, mesh, x64):
    for ours, theirs in ((max_pool, F.max_pool2d), (avg_pool, F.avg_pool2d)):
        numbers = {"stride": 2, "padding": 1, "ceil_mode": ceil}
        check(
            lambda x, ours=ours, numbers=numbers, **layout: ours(
                x, 3, method=method, **numbers, **layout
            ),
            lambda x, theirs=theirs, numbers=numbers: theirs(x, 3, **numbers),
            RNG.normal(size=(2, 2, 16, 5)),
            (),
            2,
            SPLITS["even"],
            mesh,
            SPEC,
        )


def test_dilated_maximum_gives_its_gradient_to_the_first(mesh, x64):
    x = RNG.integers(0, 3, size=(2, 1, 18, 4)).astype(float)
    check(
        lambda x, **layout: max_pool(x, 3, stride=(2, 1), padding=1, dilation=(2, 1), **layout),
        lambda x: F.max_pool2d(x, 3, (2, 1), 1, (2, 1)),
        x,
        (),
        2,
        SPLITS["any"],
        mesh,
        SPEC,
    )


def test_integers_have_a_maximum(mesh):
    x = RNG.integers(-9, 9, size=(2, 1, 18)).astype(np.int32)
    u = packed(x, 2, SPLITS["any"], mesh, SPEC, padding=99)
    expected = F.max_pool1d(jax_to_torch(x), 3, 1, 1)
    np.testing.assert_array_equal(whole(max_pool(u, 3, stride=1, padding=1)), expected.numpy())


def jax_to_torch(x):
    import torch

    return torch.tensor(x.astype(np.float32))


def test_a_divisor_of_ones_own(mesh, x64):
    x = RNG.normal(size=(1, 1, 18))
    u = packed(x, 2, SPLITS["empty"], mesh, (None, None, "y"))
    out = avg_pool(u, 3, stride=1, divisor_override=6)
    windows = np.lib.stride_tricks.sliding_window_view(x, 3, 2)
    np.testing.assert_allclose(whole(out), windows.sum(-1) / 6)


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    with pytest.raises(ShardingError, match=r"max_pool: window 0 .*; padding \(2,\) is more than"):
        max_pool(x, 0, padding=2)
    with pytest.raises(ShardingError, match=r"not one to three axes of space"):
        max_pool(jax.numpy.ones((2, 16)), 2)
    with pytest.raises(ShardingError, match=r"x is of int32, and a mean of floats"):
        avg_pool(jax.numpy.ones((1, 1, 8), "int32"), 2)
