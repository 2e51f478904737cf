import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.row_windows import MODES
from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.layout.axis_types import under_auto
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_put import shard
from isoshard.domain.windows.halo import halo, halo_exchange
from tests.domain.against_torch import SPLITS, packed
from tests.domain.blocks import out_of_blocks as whole

RNG = np.random.default_rng(0)


def expected(x, sizes, before, after, mode):
    """The shards with their halos, cut out of the padded whole."""
    wide = np.pad(x, [(0, 0), (before, after)], "constant" if mode == "zero" else mode)
    starts = np.cumsum((0, *sizes[:-1]))
    return np.concatenate(
        [wide[:, s : s + n + before + after] for s, n in zip(starts, sizes, strict=True)], 1
    )


WIDTHS = [("even", (2, 1)), ("chunk", (0, 11)), ("any", (3, 1)), ("empty", (7, 9))]
CASES = {mode: WIDTHS[-n % 4] for n, mode in enumerate(MODES)}


def test_shards_and_their_gradients(mesh, x64):
    xs = {mode: RNG.normal(size=(4, sum(SPLITS[split]))) for mode, (split, _) in CASES.items()}
    laid = {mode: packed(x, 1, SPLITS[CASES[mode][0]], mesh, ("x", "y")) for mode, x in xs.items()}

    def weighed(laid):
        outs, total = {}, 0.0
        for mode, u in laid.items():
            out = halo_exchange(u, CASES[mode][1], 1, mode, mesh=mesh, spec=("x", "y"))
            if isinstance(out, UnevenArray):
                total += (out.array**2).sum(where=out.mask()) / 2
            else:
                total += (out**2).sum() / 2
            outs[mode] = out
        return total, outs

    with jax.set_mesh(mesh):
        slopes, outs = jax.jit(jax.grad(weighed, has_aux=True))(laid)
    for mode, (split, width) in CASES.items():
        sizes, x, u = SPLITS[split], xs[mode], laid[mode]
        right = expected(x, sizes, *width, mode)
        np.testing.assert_array_equal(whole(outs[mode]), right, err_msg=mode)
        assert outs[mode].sharding.is_equivalent_to(u.sharding, 2), mode
        numbers = np.arange(sum(sizes))[None]
        copies = np.bincount(expected(numbers, sizes, *width, mode)[0], minlength=sum(sizes))
        if mode == "zero":  # row 0 stands for what is not there
            copies[0] = np.sum(expected(numbers + 1, sizes, *width, mode) == 1)
        np.testing.assert_allclose(whole(slopes[mode]), x * copies, err_msg=mode)
    told = halo_exchange(laid["edge"], CASES["edge"][1], 1, "edge")  # by its sharding
    np.testing.assert_array_equal(whole(told), whole(outs["edge"]))


def test_the_batch_is_not_gathered(mesh):
    x = shard(np.ones((4, 16), np.float32), mesh, ("x", "y"))
    program = jax.jit(lambda x: halo_exchange(x, 1, 1, mesh=mesh, spec=("x", "y")))
    text = program.lower(x).compile().as_text()
    assert text.count(" collective-permute(") == 2
    assert "all-" not in text


def test_faults_are_told(mesh):
    x = shard(np.ones((8, 3), np.float32), mesh, ("y",))
    with pytest.raises(ShardingError, match=r"axis 1 of an array of shape \(8, 3\) is not split"):
        halo_exchange(x, 1, 1)
    with pytest.raises(ShardingError, match=r"width -1 is .*; mode 'odd' .*; axis 2 is none"):
        halo_exchange(x, -1, 2, "odd")
    with pytest.raises(ShardingError, match=r"inside jax.jit a value has no sharding"):
        jax.jit(lambda x: halo_exchange(x, 1, 0))(under_auto(x))  # a type would tell
    with pytest.raises(TypeError, match="got ndarray"):
        halo_exchange(np.ones(8), 1, 0)
    with pytest.raises(UnevenError, match=r"axis 0 has 2 blocks, and 4 shards"):
        halo_exchange(UnevenArray(x, (5, 3), ((2, 3), None)), 1, 0)
    with pytest.raises(ShardingError, match="has 1 row in all, which mode 'reflect' cannot"):
        halo_exchange(UnevenArray(x, (1, 3), ((1, 0, 0, 0), None)), 1, 0, "reflect")
    line = make_mesh((4,), ("y",))
    with pytest.raises(ShardingError, match=r"sizes \(1, 1\) are not one for each of 4 devices"):
        jax.shard_map(
            lambda block: halo(block, 1, 0, "y", sizes=(1, 1)),
            mesh=line,
            in_specs=P("y"),
            out_specs=P("y"),
        )(shard(np.ones(8, np.float32), line, ("y",)))
