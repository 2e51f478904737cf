import jax
import numpy as np
import pytest
from torch.nn import functional as F

from isoshard.core.domain.windows.resize import interpolate
from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check, packed

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")
TORCH = {("linear", 3): "linear", ("linear", 4): "bilinear", ("cubic", 4): "bicubic"}


def compare(split, mesh, shape, mode, **numbers):
    corners = numbers.get("align_corners") if mode in ("linear", "cubic") else None
    size, scale = numbers.get("size"), numbers.get("scale")
    name = TORCH.get((mode, len(shape)), mode)
    return check(
        lambda x, **layout: interpolate(x, mode=mode, **numbers, **layout),
        lambda x: F.interpolate(x, size, scale, name, align_corners=corners),
        RNG.normal(size=shape),
        (),
        2,
        SPLITS[split],
        mesh,
        SPEC,
    )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "area"])
@pytest.mark.parametrize(("split", "size"), [("any", 27), ("empty", 36), ("any", 7)])
def test_sizes_on_uneven_shards(mode, split, size, mesh, x64):
    compare(split, mesh, (2, 2, 18), mode, size=size)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("split", ["even", "any"])
def test_corners(mode, corners, split, mesh, x64):
    shape = (2, 1, sum(SPLITS[split]), 4)
    compare(split, mesh, shape, mode, size=(40, 7), align_corners=corners)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_scales_are_used_as_they_are(mode, mesh, x64):
    out = compare("any", mesh, (2, 1, 18, 4), mode, scale=(1.7, 0.6))
    assert out.shape == (2, 1, 30, 2)


def test_one_row(mesh, x64):
    compare("any", mesh, (2, 1, 18), "linear", size=1, align_corners=True)


def test_doubling_keeps_each_output_with_its_row(mesh, x64):
    assert compare("empty", mesh, (2, 1, 18), "linear", scale=2.0).sizes[2] == (0, 6, 18, 12)


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    with pytest.raises(ShardingError, match=r"scale -1.0 is no number above 0"):
        interpolate(x, scale=-1.0)
    with pytest.raises(ShardingError, match=r"scale 0.01 leaves nothing of \(16,\)"):
        interpolate(x, scale=0.01)
    with pytest.raises(ShardingError, match=r"mode 'bilinear' is none of 'nearest'"):
        interpolate(x, size=4, mode="bilinear")
    with pytest.raises(ShardingError, match=r"x is of int32, and mode 'linear' of floats"):
        interpolate(x.astype("int32"), size=4, mode="linear")
    with pytest.raises(ShardingError, match=r"not one to three axes of space"):
        interpolate(jax.numpy.ones((2, 16)), size=4)


def test_derivatives_of_both_kinds_and_twice(mesh, x64):
    x = packed(RNG.normal(size=(2, 1, 18)), 2, SPLITS["any"], mesh, SPEC)

    def squares(array):
        u = UnevenArray(array, x.shape, x.sizes)
        out = interpolate(u, size=27, mode="linear", mesh=mesh, spec=SPEC)
        return (out.array**2).sum(where=out.mask())

    array = jax.numpy.where(x.mask(), x.array, 0)
    value, slope = jax.jvp(squares, (array,), (array,))
    np.testing.assert_allclose(slope, 2 * value)  # of a sum of squares
    with jax.set_mesh(mesh):
        twice = jax.grad(lambda array: (jax.grad(squares)(array) * array).sum())(array)
        once = jax.grad(squares)(array)
    np.testing.assert_allclose(twice, 2 * once, atol=1e-12)
