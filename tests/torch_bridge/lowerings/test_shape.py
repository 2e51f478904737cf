"""Joining, turning, copying, casting and padding against CPU torch, and on split axes."""

import itertools

import numpy as np
import pytest
import torch

import isoshard as iso
from tests.torch_bridge.lowerings.harness import evaluate, together
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    BYTES,
    COMPLEX,
    CUBE,
    EMPTY,
    FLOATS,
    HALVES,
    INTS,
    ROW,
    SCALAR,
)

aten = torch.ops.aten
IMAGE = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
VOLUME = torch.arange(3 * 3 * 4 * 5.0).reshape(3, 3, 4, 5)


def test_joins_turns_and_copies():
    """Of several dtypes, of nothing, of numbers, by negative steps."""
    image = torch.arange(2 * 8 * 2 * 3.0).reshape(2, 8, 2, 3)
    with together() as check:
        check(aten.cat.default, [FLOATS, INTS, HALVES], -1)
        check(aten.cat.default, [torch.empty(0), FLOATS], 1)
        check(aten.cat.default, [torch.empty(0), torch.empty(0)])
        check(aten.cat.default, [EMPTY, FLOATS], 0)
        check(aten.stack.default, [SCALAR, SCALAR], -1)
        check(aten.flip.default, SCALAR, [0])
        check(aten.flip.default, SCALAR, [])
        check(aten.roll.default, CUBE, [1, -5], [0, 2])
        check(aten.roll.default, CUBE, [7])
        check(aten.roll.default, EMPTY, [1], [0])
        for k in (-1, 0, 2, 5):
            check(aten.rot90.default, CUBE, k, [0, 2])
        check(aten.repeat.default, FLOATS, [2, 1, 3])
        check(aten.repeat.default, FLOATS, [0, 2])
        check(aten.repeat.default, SCALAR, [2])
        check(aten.repeat_interleave.self_int, FLOATS, 3)
        check(aten._unsafe_view.default, CUBE, [4, -1])
        check(aten.copy.default, HALVES, ROW)
        check(aten.copy.default, INTS, FLOATS)
        for op in (aten.tril.default, aten.triu.default):
            for diagonal in (-2, 0, 1):
                check(op, CUBE, diagonal)
                check(op, BOOLS, diagonal)
        check(aten.pixel_shuffle.default, image[0], 2)
        check(aten.pixel_unshuffle.default, image.repeat(1, 1, 2, 2), 2)
        check(aten.pixel_shuffle.default, torch.empty(0, 4, 2, 2), 2)
        check(aten.channel_shuffle.default, image, 4)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_casts():
    """Floats are cut to zero."""
    values = torch.tensor([0j, 1j, 2 - 1j, complex(-0.0, -0.0), 3])
    with together() as check:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
            for x in (FLOATS, INTS, BOOLS, BYTES):
                check(aten._to_copy.default, x, dtype=dtype)
        for dtype in (torch.bool, torch.float32, torch.int32, torch.complex64):
            check(aten._to_copy.default, values, dtype=dtype)
            check(aten.copy.default, torch.empty(5, dtype=dtype), values)
        check(aten._to_copy.default, FLOATS, dtype=torch.complex64)
        check(aten._to_copy.default, COMPLEX)
    got = evaluate(aten._to_copy.default, torch.tensor([1.9, -1.9]), dtype=torch.int64)[0]
    np.testing.assert_array_equal(got, [1, -1])


def test_pads():
    with together() as check:
        constant = aten.constant_pad_nd.default
        for pad in ([1, 2], [0, -2, 3, 0], [-1, -1], [1, 1, 1, 1, 0, 2]):
            check(constant, CUBE, pad, 7.5)
            check(constant, INTS[None], pad, 3)
        for size in (1, 3):
            x = torch.arange(1.0, 2 * size + 1).reshape(size, 2)
            for low in range(-size, 4, size - 1 or 1):
                for high in range(-size - min(0, low), 4, 2):
                    check(constant, x, [0, 0, low, high], 9.0)
        for rank, values, padding in (
            (1, CUBE, [2, 1]),
            (1, FLOATS, [0, 3]),
            (2, IMAGE, [1, 2, 3, 0]),
            (2, IMAGE, [-1, 1, -2, 1]),
            (3, VOLUME, [1, 2, 0, 1, 2, 1]),
        ):
            for name in ("reflection", "replication"):
                forward, backward = (
                    getattr(aten, f"{name}_pad{rank}d{end}").default for end in ("", "_backward")
                )
                check(forward, values, padding)
                check(backward, forward(values, padding).cos(), values, padding)


def test_pads_of_a_split_axis():
    """XLA ended the process for a part of the padding, and was wrong about the second pad."""
    mesh = iso.make_mesh((4, 2), ("x", "y"))

    def program(x, pad, part):
        return torch.constant_pad_nd(x, (0, 0, *pad), 9.0)[part]

    x, found = torch.arange(1.0, 9.0).reshape(2, 4), []
    for spec in (iso.P("y", "x"), iso.P("y")):
        split = iso.shard(x, mesh, spec)
        for case in itertools.product(((1, 1), (2, -2), (-1, 1), (2, 0)), (0, -1, slice(1, 3))):
            found.append((f"{spec} {case}", program(split, *case), program(x, *case)))
    for name, got, want in found:
        torch.testing.assert_close(got.cpu(), want, msg=name)


def test_shuffled_pixels_keep_their_memory_format():
    x = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    want, got = (torch.nn.functional.pixel_shuffle(each, 2) for each in (x, x.to("jax")))
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want)
    assert torch.zeros(0, device="jax").roll(1, 2).shape == (0,)  # along any axis
