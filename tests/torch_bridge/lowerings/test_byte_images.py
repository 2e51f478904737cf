"""Images of bytes are resized to the bytes that CPU torch gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

WAYS = [("bilinear", False), ("bicubic", False), ("bilinear", True), ("bicubic", True)]
SIZES = [{"size": (7, 11)}, {"size": (2, 3)}, {"scale_factor": 2}, {"scale_factor": 0.61}]
SIZES += [{"size": (9, 13)}, {"size": (7, 9), "align_corners": True}, {"size": (32, 33)}]


def images(*shape):
    source = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


@pytest.mark.parametrize("mode", WAYS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_are_those_of_the_cpu(mode, size):
    way, antialias = mode
    for x in (
        images(2, 3, 9, 7),
        images(1, 5, 16, 12).contiguous(memory_format=torch.channels_last),
        images(4, 3, 19, 38),
    ):
        want = F.interpolate(x, mode=way, antialias=antialias, **size)
        got = F.interpolate(x.to("jax"), mode=way, antialias=antialias, **size).cpu()
        assert torch.equal(got, want)


def test_split_images_of_bytes():
    x = images(2, 3, 8, 7)
    split = xs.mark_sharding(x.to("jax"), iso.make_mesh((4,), ("x",)), (None, None, "x", None))
    for antialias in (False, True):
        want = F.interpolate(x, size=(16, 5), mode="bilinear", antialias=antialias)
        got = F.interpolate(split, size=(16, 5), mode="bilinear", antialias=antialias)
        assert torch.equal(got.cpu(), want)
