import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.domain.windows.conv import conv
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check, packed, whole

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")  # batch over "x", rows over "y"

# kernel, stride, padding, dilation, groups
KINDS = {
    "same": (3, 1, 1, 1, 1),
    "even kernel": (4, 2, 1, 1, 2),
    "strided": (3, 2, 1, 1, 1),
    "dilated": (3, 1, 0, 2, 1),
    "wider than a shard": (7, 1, 3, 1, 1),
    "stride beyond kernel": (1, 3, 0, 1, 1),
    "wide padding": (3, 1, 4, 1, 1),
}


def both(stride=1, padding=0, dilation=1, groups=1, **more):
    def ours(x, w, **layout):
        return conv(
            x, w, stride=stride, padding=padding, dilation=dilation, groups=groups, **more, **layout
        )

    def theirs(x, w):
        function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
        return function(x, w, None, stride, padding, dilation, groups)

    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["any", "empty"])
def test_uneven_shards_in_two_axes_of_space(kind, split, mesh, x64):
    k, s, p, d, g = KINDS[kind]
    x = RNG.normal(size=(2, 4, 18, 4))
    w = RNG.normal(size=(2, 4 // g, k, 2))
    ours, theirs = both((s, 1), (p, 1), (d, 1), g)
    out = check(ours, theirs, x, (w,), 2, SPLITS[split], mesh, SPEC)
    if kind == "same":
        assert out.sizes[2] == SPLITS[split]


@pytest.mark.parametrize("split", ["even", "chunk"])
@pytest.mark.parametrize("kind", ["same", "strided", "dilated"])
def test_even_and_chunked_shards_in_one_axis(kind, split, mesh, x64):
    k, s, p, d, g = KINDS[kind]
    sizes = SPLITS[split]
    x, w = RNG.normal(size=(2, 2, sum(sizes))), RNG.normal(size=(3, 2, k))
    ours, theirs = both(s, p, d, g)
    check(ours, theirs, x, (w,), 2, sizes, mesh, SPEC)


def test_even_shards_by_windows_as_by_the_compiler(mesh, x64):
    x, w = RNG.normal(size=(2, 2, 16, 4)), RNG.normal(size=(3, 2, 4, 3))
    for method in ("windows", "xla"):
        ours, theirs = both((2, 1), (1, 1), method=method)
        out = check(ours, theirs, x, (w,), 2, SPLITS["even"], mesh, SPEC)
        assert not isinstance(out, UnevenArray)


def test_three_axes_of_which_two_are_split(mesh, x64):
    x, w = RNG.normal(size=(1, 2, 6, 18, 3)), RNG.normal(size=(2, 2, 3, 2, 3))
    ours, theirs = both((1, 2, 1), (1, 0, 1))
    check(ours, theirs, x, (w,), 3, (5, 2, 7, 4), mesh, (None, None, "x", "y"))


def test_eight_shards_over_two_mesh_axes(mesh, x64):
    x, w = RNG.normal(size=(1, 1, 20)), RNG.normal(size=(1, 1, 5))
    ours, theirs = both(1, 2)
    sizes = (1, 0, 5, 2, 3, 4, 0, 5)
    out = check(ours, theirs, x, (w,), 2, sizes, mesh, (None, None, ("x", "y")))
    assert out.sizes[2] == sizes


@pytest.mark.parametrize("mode", ["wrap", "edge", "reflect"])
def test_padding_modes(mode, mesh, x64):
    x, w = RNG.normal(size=(1, 2, 18, 6)), RNG.normal(size=(2, 2, 5, 3))
    ours, _ = both(1, (4, 1), mode=mode)
    name = {"wrap": "circular", "edge": "replicate"}.get(mode, mode)
    check(
        ours,
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 4, 4), mode=name), w),
        x,
        (w,),
        2,
        SPLITS["any"],
        mesh,
        (None, None, "y"),
    )


def test_same_padding_of_an_even_kernel(mesh, x64):
    x, w = RNG.normal(size=(1, 1, 18)), RNG.normal(size=(1, 1, 4))
    out = conv(packed(x, 2, SPLITS["any"], mesh, (None, None, "y")), w, padding="same")
    expected = F.conv1d(F.pad(torch.tensor(x), (1, 2)), torch.tensor(w))
    np.testing.assert_allclose(whole(out), expected.numpy())


def test_an_uneven_batch_is_not_read_beyond_its_end(mesh, x64):
    x, w = RNG.normal(size=(5, 2, 8)), RNG.normal(size=(2, 2, 3))
    ours, theirs = both(1, 1)
    check(ours, theirs, x, (w,), 0, (2, 0, 1, 2), mesh, ("y", None, "x"))


def test_outputs_that_do_not_divide_come_uneven():
    x = shard(np.ones((1, 1, 16), np.float32), make_mesh((4,), ("x",)), (None, None, "x"))
    out = conv(x, np.ones((1, 1, 3), np.float32))
    assert out.sizes == (None, None, (3, 4, 4, 3))


def test_the_neighbours_rows_are_all_that_moves(mesh, x64):
    x = packed(RNG.normal(size=(2, 2, 18, 4)), 2, SPLITS["any"], mesh, SPEC)
    w = RNG.normal(size=(2, 2, 3, 3))
    program = jax.jit(lambda x, w: conv(x, w, padding=1, mesh=mesh, spec=SPEC))
    text = program.lower(x, w).compile().as_text()
    moved = [line for line in text.splitlines() if " collective-permute(" in line]
    assert len(moved) == 2
    assert all("f64[1,2,1,4]" in line for line in moved)
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    w = np.ones((2, 2, 3), np.float32)
    with pytest.raises(ShardingError, match=r"stride 0 .*'odd' is none of .*; padding -1"):
        conv(x, w, stride=0, padding=-1, method="odd")
    with pytest.raises(ShardingError, match=r"both have two axes and then one to three of space"):
        conv(x, w[0])
    with pytest.raises(ShardingError, match=r"axis 2 of size 16 gives no outputs"):
        conv(x, np.ones((2, 2, 17), np.float32))
    with pytest.raises(ShardingError, match=r"takes 4 channels, and x has 2"):
        conv(x, np.ones((2, 4, 3), np.float32))
    with pytest.raises(ShardingError, match=r"'same' is for stride 1"):
        conv(x, w, padding="same", stride=2)
    with pytest.raises(ShardingError, match=r"alike before and after"):
        conv(x, w, method="xla")
    with pytest.raises(ShardingError, match=r"axis 1 is summed over, and padded"):
        channels = packed(np.ones((2, 5, 16), np.float32), 1, (2, 1, 1, 1), mesh, (None, "y"))
        conv(channels, np.ones((2, 5, 3), np.float32))
