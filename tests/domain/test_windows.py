"""Operators that read neighbouring rows, on shards of every kind, against torch in float64.

Forward and backward: convolutions, pooling, resizing, padding and running sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.device_put import shard
from isoshard.domain import avg_pool, conv, conv_transpose, cumsum, interpolate, max_pool, pad, roll
from isoshard.domain.windows.running_scan import cummin
from tests.domain.against_torch import SPLITS, check, packed
from tests.domain.blocks import out_of_blocks as whole

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")  # batch over "x", rows over "y"
LAST = (None, None, "y")
EIGHT = (1, 0, 5, 2, 3, 4, 0, 5)


def convolved(**numbers):
    method = {"method": numbers.pop("method", "auto")}

    def theirs(x, w):
        return getattr(F, f"conv{x.ndim - 2}d")(x, w, **numbers)

    return lambda x, w, **layout: conv(x, w, **method, **numbers, **layout), theirs


def transposed(**numbers):
    method = {"method": numbers.pop("method", "auto")}

    def theirs(x, w):
        return getattr(F, f"conv_transpose{x.ndim - 2}d")(x, w, **numbers)

    return lambda x, w, **layout: conv_transpose(x, w, **method, **numbers, **layout), theirs


def pooled(function, window, **numbers):
    method = {"method": numbers.pop("method", "auto")}

    def theirs(x):
        return getattr(F, f"{function.__name__}{x.ndim - 2}d")(x, window, **numbers)

    return lambda x, **layout: function(x, window, **method, **numbers, **layout), theirs


def resized(mode, size=None, scale=None, align_corners=None):
    corners = {} if align_corners is None else {"align_corners": align_corners}

    def theirs(x):
        name = mode if x.ndim == 3 else {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
        return F.interpolate(x, size, scale, name, **corners)

    given = corners | ({"size": size} if scale is None else {"scale": scale})
    return lambda x, **layout: interpolate(x, mode=mode, **given, **layout), theirs


def padded(mode, name, rows=(7, 5), **more):
    def ours(x, **layout):
        return pad(x, {2: rows, -1: (1, 2)} if x.ndim == 4 else {2: rows}, mode, **more, **layout)

    def theirs(x):
        return F.pad(x, (1, 2, *rows) if x.ndim == 4 else rows, name, **more)

    return ours, theirs


def around(mode, name):
    """A convolution whose padding is read from elsewhere."""

    def theirs(x, w):
        return F.conv2d(F.pad(x, (1, 1, 4, 4), mode=name), w)

    return lambda x, w, **layout: conv(x, w, padding=(4, 1), mode=mode, **layout), theirs


def running(function, **options):
    def theirs(x):
        if options:
            return x.flip(2).cumsum(2).flip(2)
        found = getattr(torch, function.__name__)(x, 2)
        return found if isinstance(found, torch.Tensor) else found[0]

    return lambda x, **layout: function(x, -1, **options, **layout), theirs


def rolled(shift):
    return lambda x, **layout: roll(x, shift, 2, **layout), lambda x: torch.roll(x, shift, 2)


CONVOLUTIONS = {
    "even kernel": (
        convolved(stride=(2, 1), padding=(1, 1), groups=2), "empty", (2, 4, 18, 4), (2, 2, 4, 2),
    ),
    "stride beyond kernel": (convolved(stride=3), "any", (2, 4, 18), (2, 4, 1)),
    "even, by the compiler": (
        convolved(stride=(2, 1), padding=(1, 1), method="xla"), "even", (2, 2, 16, 4), (3, 2, 4, 3),
    ),
    "reflect": (around("reflect", "reflect"), "empty", (2, 2, 18, 6), (2, 2, 5, 3)),
    "transposed, output padding, dilated": (
        transposed(stride=2, padding=1, output_padding=1, groups=2, dilation=2),
        "empty", (2, 4, 18), (4, 3, 3),
    ),
    "transposed, stride beyond kernel": (
        transposed(stride=3, output_padding=2, method="windows"), "even", (2, 4, 16), (4, 3, 1),
    ),
}  # fmt: skip
WINDOWS = {
    "max, stride beyond window": (
        pooled(max_pool, 2, stride=5, padding=1, ceil_mode=True, method="windows"), "empty",
    ),
    "mean, overlapping": (
        pooled(avg_pool, (3, 2), stride=(1, 1), padding=(1, 1), count_include_pad=False), "any", 3,
    ),
    "nearest-exact": (resized("nearest-exact", 36), "empty"),
    "linear, one row": (resized("linear", 1, align_corners=True), "any"),
    "cubic, corners": (resized("cubic", (20, 7), align_corners=True), "any", 4),
    "linear, scaled": (resized("linear", scale=1.7), "empty"),
    "rows taken away": (padded("zero", "constant", (-6, 2), value=3), "any"),
    "roll, uneven": (rolled(-20), "empty"),
    "cumsum, reversed": (running(cumsum, reverse=True), "any"),
}  # fmt: skip


def row(ours, theirs, split, shape, operands=(), spec=SPEC):
    x = RNG.normal(size=shape)
    return ours, theirs, x, [RNG.normal(size=one) for one in operands], 2, SPLITS[split], spec


def test_convolutions(mesh, x64):
    mesh = auto(mesh)  # pullbacks that leave a jitted function lose the types of what they keep
    rows = {
        name: row(*functions, split, shape, operands)
        for name, (functions, split, shape, *operands) in CONVOLUTIONS.items()
    }
    x, w = RNG.normal(size=(1, 1, 20)), RNG.normal(size=(1, 1, 5))
    rows["rows over two mesh axes"] = (
        *convolved(padding=2), x, (w,), 2, EIGHT, (None, None, ("x", "y"))
    )  # fmt: skip
    x, w = RNG.normal(size=(5, 2, 8)), RNG.normal(size=(2, 2, 3))
    rows["an uneven batch"] = *convolved(padding=1), x, (w,), 0, (2, 0, 1, 2), ("y", None, "x")
    found = check(rows, mesh)
    assert found["rows over two mesh axes"].sizes[2] == EIGHT


def test_windows(mesh, x64):
    """And a running sum along an unsplit axis, and a maximum with its gradient to the first."""
    rows = {
        name: row(*functions, split, (2, 2, sum(SPLITS[split]), *more))
        for name, (functions, split, *more) in WINDOWS.items()
    }
    along = lambda x, **layout: cumsum(x, 1, **layout)  # noqa: E731
    rows["cumsum, whole"] = row(along, lambda x: torch.cumsum(x, 1), "any", (2, 3, 18))
    ties = RNG.integers(0, 3, size=(2, 1, 18, 4)).astype(float)
    dilated = pooled(max_pool, 3, stride=(2, 1), padding=1, dilation=(2, 1))
    rows["max, dilated"] = *dilated, ties, (), 2, SPLITS["any"], SPEC
    found = check(rows, mesh)
    assert found["roll, uneven"].sizes[2] == SPLITS["empty"]


def test_integers(mesh):
    x = RNG.integers(-9, 9, size=(2, 1, 18)).astype(np.int32)
    u = packed(x, 2, SPLITS["any"], mesh, SPEC, padding=99)
    expected = F.max_pool1d(torch.tensor(x.astype(np.float32)), 3, 1, 1)
    np.testing.assert_array_equal(whole(max_pool(u, 3, stride=1, padding=1)), expected.numpy())
    x = RNG.integers(-9, 9, (2, 2, 16)).astype(np.int32)
    found = cummin(shard(x, mesh, SPEC), 2, reverse=True)
    np.testing.assert_array_equal(found, np.minimum.accumulate(x[..., ::-1], 2)[..., ::-1])


def test_blocks_of_results(mesh):
    x = shard(np.ones((1, 1, 16), np.float32), make_mesh((4,), ("x",)), (None, None, "x"))
    assert conv(x, np.ones((1, 1, 3), np.float32)).sizes == (None, None, (3, 4, 4, 3))
    u = packed(np.ones((2, 1, 18), np.float32), 2, SPLITS["empty"], mesh, SPEC)
    assert interpolate(u, scale=2.0, mode="linear").sizes[2] == (0, 6, 18, 12)
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    assert pad(x, [(0, 0)] * 3) is x


def test_pads_wider_than_the_axis_and_same_padding(mesh, x64):
    x = RNG.normal(size=18)
    u = packed(x, 0, SPLITS["any"], mesh, ("y",))
    modes = ("wrap", "reflect", "symmetric")
    told = {"mesh": mesh, "spec": ("y",)}
    found = jax.jit(lambda u: {mode: pad(u, [(40, 23)], mode, **told) for mode in modes})(u)
    for mode in modes:
        np.testing.assert_array_equal(whole(found[mode]), np.pad(x, (40, 23), mode))
    x, w = RNG.normal(size=(1, 1, 18)), RNG.normal(size=(1, 1, 4))
    out = conv(packed(x, 2, SPLITS["any"], mesh, LAST), w, padding="same")
    expected = F.conv1d(F.pad(torch.tensor(x), (1, 2)), torch.tensor(w))
    np.testing.assert_allclose(whole(out), expected.numpy())


def test_what_moves(mesh, x64):
    """The neighbours' rows for windows; of running sums one number for each line."""
    x = packed(RNG.normal(size=(2, 2, 18, 4)), 2, SPLITS["any"], mesh, SPEC)
    w = RNG.normal(size=(2, 2, 3, 3))
    program = jax.jit(lambda x, w: conv(x, w, padding=1, mesh=mesh, spec=SPEC))
    text = program.lower(x, w).compile().as_text()
    moved = [line for line in text.splitlines() if " collective-permute(" in line]
    assert len(moved) == 2 and all("f64[1,2,1,4]" in line for line in moved)
    assert "all-gather" not in text and "all-to-all" not in text
    x = shard(np.ones((2, 2, 64), np.float32), mesh, SPEC)
    program = jax.jit(lambda x: cumsum(x, 2, mesh=mesh, spec=SPEC))
    text = program.lower(x).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert gathers and all("f32[1,2,4]" in line for line in gathers)


def test_derivatives_of_both_kinds_and_twice(mesh, x64):
    x = packed(RNG.normal(size=(2, 1, 18)), 2, SPLITS["any"], mesh, SPEC)

    def squares(array):
        u = UnevenArray(array, x.shape, x.sizes)
        out = interpolate(u, size=27, mode="linear", mesh=mesh, spec=SPEC)
        return (out.array**2).sum(where=out.mask())

    @jax.jit
    def derivatives(array):
        once = jax.grad(squares)
        twice = jax.grad(lambda array: (once(array) * array).sum())
        return *jax.jvp(squares, (array,), (array,)), once(array), twice(array)

    with jax.set_mesh(mesh):
        value, slope, once, twice = derivatives(jnp.where(x.mask(), x.array, 0))
    np.testing.assert_allclose(slope, 2 * value)  # of a sum of squares
    np.testing.assert_allclose(twice, 2 * once, atol=1e-12)


W = np.ones((2, 2, 3), np.float32)
FAULTS = [
    (lambda x: conv(x, W, stride=0, padding=-1, method="odd"),
     r"stride 0 .*'odd' is none of .*; padding -1"),
    (lambda x: conv(x, W[0]), "both have two axes and then one to three of space"),
    (lambda x: conv(x, np.ones((2, 2, 17), np.float32)), "axis 2 of size 16 gives no outputs"),
    (lambda x: conv(x, np.ones((2, 4, 3), np.float32)), "takes 4 channels, and x has 2"),
    (lambda x: conv(x, W, padding="same", stride=2), "'same' is for stride 1"),
    (lambda x: conv(x, W, method="xla"), "alike before and after"),
    (lambda x: conv_transpose(x, np.ones((3, 1, 3), np.float32)),
     r"kernel of shape \(3, 1, 3\) .*, and x has 2"),
    (lambda x: conv_transpose(x, W[:, :1], output_padding=1),
     r"output_padding \(1,\) is not less"),
    (lambda x: max_pool(x, 0, padding=2), r"max_pool: window 0 .*; padding \(2,\) is more than"),
    (lambda x: max_pool(jnp.ones((2, 16)), 2), "not one to three axes of space"),
    (lambda x: avg_pool(jnp.ones((1, 1, 8), "int32"), 2), "x is of int32, and a mean of floats"),
    (lambda x: pad(x, {3: (1, 1), 0: 1}), "axis 3 is none of the 3 axes; widths 1 of axis 0"),
    (lambda x: pad(x, {0: (1, 1)}, "constant"), "mode 'constant' is none of 'zero'"),
    (lambda x: pad(x, {2: (-8, -8)}), "axis 2 of size 16 gives no outputs"),
    (lambda x: roll(x, 0.5, 4), "shift 0.5 is no integer; axis 4 is none"),
    (lambda x: interpolate(x, scale=-1.0), "scale -1.0 is no number above 0"),
    (lambda x: interpolate(x, scale=0.01), r"scale 0.01 leaves nothing of \(16,\)"),
    (lambda x: interpolate(x, size=4, mode="bilinear"), "mode 'bilinear' is none of 'nearest'"),
    (lambda x: interpolate(x.astype("int32"), size=4, mode="linear"),
     "x is of int32, and mode 'linear' of floats"),
    (lambda x: interpolate(jnp.ones((2, 16)), size=4), "not one to three axes of space"),
    (lambda x: cumsum(x.astype(bool), 3), "axis 3 is none of the 3 axes; x is of bool"),
]  # fmt: skip


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    for call, message in FAULTS:
        with pytest.raises(ShardingError, match=message):
            call(x)
    channels = packed(np.ones((2, 5, 16), np.float32), 1, (2, 1, 1, 1), mesh, (None, "y"))
    with pytest.raises(ShardingError, match="axis 1 is summed over, and padded"):
        conv(channels, np.ones((2, 5, 3), np.float32))
