"""Resizing and sampling of images against CPU torch, forward and backward; bytes exactly."""

from __future__ import annotations

import jax
import pytest
import torch
import torch.nn.functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import as_cpu, to_array, together

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def randn(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def test_resizing_and_its_gradients():
    """To given sizes and by given scales, of which those beat the ratio of sizes; in halves."""
    cases = {}

    def resized(name, x, **options):
        cases[f"{name} {options}"] = (lambda x: F.interpolate(x, **options), x)

    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):  # to one row
        resized("row", randn(1, 2, 4, 5), size=[1, 9], mode=mode)
    resized("trilinear", randn(1, 1, 3, 4, 2), size=[5, 2, 3], mode="trilinear", align_corners=True)
    for mode, size, align in (("bilinear", [8, 10], False), ("bicubic", [6, 3], True)):
        options = {"mode": mode, "size": size, "align_corners": align, "antialias": True}
        resized("smooth", randn(1, 2, 7, 9), **options)
    for scale, mode in ((1.7, "nearest"), (0.6, "bicubic")):
        options = {"scale_factor": scale, "mode": mode, "recompute_scale_factor": False}
        resized("scale", randn(2, 3, 5, 6), **options)
    options = {"scale_factor": (0.4, 0.45), "antialias": True, "recompute_scale_factor": False}
    resized("smooth scale", randn(1, 1, 8, 8), mode="bilinear", **options)
    half = lambda x: F.interpolate(x.detach(), [8, 7], mode="bilinear")  # noqa: E731
    cases["halves"] = (half, randn(2, 3, 4, 5).bfloat16())
    as_cpu(cases)


@pytest.mark.skipif(not hasattr(aten, "_upsample_lanczos2d_aa"), reason="torch without lanczos")
def test_lanczos():
    with together(**CLOSE) as check:
        for size in ([3, 4], [12, 5]):
            for align_corners in (False, True):
                check(aten._upsample_lanczos2d_aa.default, randn(2, 3, 7, 9), size, align_corners)


def test_positions_of_float64_are_float64():
    """As torch's: in float32 they were off by 1e-6."""
    found = []
    with jax.enable_x64(True):
        for device in ("cpu", "jax"):
            results = []
            for mode, size, align_corners, antialias in (
                ("bilinear", (13, 22), False, True),
                ("bicubic", (3, 4), True, False),
            ):
                options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
                x = randn(2, 3, 7, 9).double().to(device).requires_grad_()
                resized = F.interpolate(x, size, **options)
                resized.square().sum().backward()
                results += [resized.detach(), x.grad]
            found.append([one.cpu() for one in results])
    assert all(one.dtype == torch.float64 for one in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_whole_factors_need_no_gather():
    function = registry.find(aten.upsample_nearest2d.default).function
    text = str(jax.make_jaxpr(lambda x: function(x, [8, 10]))(to_array(randn(1, 1, 4, 5))))
    assert "gather" not in text


def images(*shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)


@pytest.mark.parametrize(("mode", "antialias"), [("bilinear", True), ("bicubic", False)])
def test_images_of_bytes_are_those_of_the_cpu(mode, antialias):
    last = images(1, 5, 16, 12).contiguous(memory_format=torch.channels_last)
    pairs = []
    for x in (images(2, 3, 9, 7), last):
        there = x.to("jax")
        for size in (
            ({"size": (7, 9), "align_corners": True}, {"size": (2, 33)})
            if x is last
            else ({"scale_factor": 0.61},)
        ):
            options = {"mode": mode, "antialias": antialias, **size}
            pairs.append((F.interpolate(there, **options), F.interpolate(x, **options)))
    mesh = iso.make_mesh((4,), ("x",))
    split = xs.mark_sharding(images(2, 3, 8, 7).to("jax"), mesh, (None, None, "x", None))
    options = {"mode": mode, "antialias": antialias, "size": (16, 5)}
    pairs.append((F.interpolate(split, **options), F.interpolate(images(2, 3, 8, 7), **options)))
    for got, want in pairs:
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_samplers_and_their_gradients(mode):
    """At points inside, outside and far outside the image."""
    cases = {}
    for padding, align, shape, out in (
        ("zeros", False, (2, 3, 4, 5), (3, 6)),
        ("border", True, (1, 1, 4, 5), (3, 2)),
        ("reflection", False, (1, 2, 3, 4, 5), (2, 3, 2)),
        ("zeros", True, (1, 2, 3, 4, 5), (2, 3, 2)),
    )[{"bicubic": slice(1), "bilinear": slice(0, 4, 3), "nearest": slice(1, 3)}[mode]]:
        x, points = randn(*shape), randn(shape[0], *out, len(out)) * 1.3
        options = {"mode": mode, "padding_mode": padding, "align_corners": align}
        sample = lambda x, p, o=options: F.grid_sample(x, p, **o)  # noqa: E731
        if mode == "bicubic":  # of its values; the operator database has the gradients
            sample = lambda x, p, o=options: F.grid_sample(x.detach(), p.detach(), **o)  # noqa: E731
        cases[f"{options}"] = (sample, x, points)
    if mode == "bilinear":
        aligned = lambda x, p: F.grid_sample(x.detach(), p, mode, "reflection", True)  # noqa: E731
        cases["of the points only"] = (aligned, randn(2, 3, 4, 5), randn(2, 3, 6, 2) * 1.3)
    as_cpu(cases, rtol=1e-3, atol=1e-3)
