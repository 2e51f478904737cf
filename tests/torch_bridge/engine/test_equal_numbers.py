"""Means of equal numbers, and other results that are exact on the CPU, are exact here."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

DEVIATIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "group_norm": lambda x: F.group_norm(x[None], 5),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "var": lambda x: x.var(1),
    "less its mean": lambda x: x - x.mean(1, keepdim=True),
    "less its pool": lambda x: x - F.adaptive_avg_pool1d(x, 1),
}


def test_equal_numbers_do_not_deviate_from_their_mean():
    cases = []
    for name, function in DEVIATIONS.items():
        for value, dtype in ((1.5, torch.float32), (0.1, torch.float64), (1.5, torch.bfloat16)):
            x = torch.full((5, 7), value, dtype=dtype)
            cases.append(((name, dtype, value), function(x), function(x.to("jax"))))
    xs.sync()
    for name, want, got in cases:
        assert name[-1] == 0.1 or not got.cpu().any(), name
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-3)


def test_equal_rows_that_lie_split_do_not_deviate_either(mesh):
    found = []
    for spec in (("x", "y"), (None, ("x", "y")), (("x", "y"), None)):
        x = xs.mark_sharding(torch.full((8, 24), 1.5, device="jax"), mesh, spec)
        found.append(F.layer_norm(x, (24,)))
    xs.sync()
    assert not any(one.cpu().any() for one in found)


def test_the_slope_of_hardsigmoid_is_torchs():
    x = torch.tensor([0.5, -4.0], dtype=torch.float64)
    slopes = []
    for device in ("cpu", "jax"):
        leaf = x.to(device).detach().requires_grad_()
        F.hardsigmoid(leaf).sum().backward()
        slopes.append(leaf.grad.cpu())
    assert torch.equal(*slopes)


def test_tensors_of_nothing_are_joined_along_any_axis_and_resized():
    nothing = torch.zeros(0, device="jax")
    for dim in (0, 1, 2, -3):
        assert torch.cat([nothing, nothing], dim).cpu().shape == (0,)
    x = torch.ones(0, 2, 3, 4)
    for mode in ("nearest", "nearest-exact", "bilinear"):
        want, got = (F.interpolate(each, size=(5, 6), mode=mode) for each in (x, x.to("jax")))
        assert got.shape == want.shape and got.stride() == want.stride()


def test_an_infinity_at_the_edge_of_split_images_stays_one():
    """Both neighbours of what lies beyond the last pixel are that pixel, with weights above 0."""
    x = torch.zeros(1, 1, 8, 8)
    x[..., 0, -1] = float("inf")
    want = F.interpolate(x, size=(16, 16), mode="bilinear")
    split = xs.mark_sharding(x.to("jax"), iso.make_mesh((4,), ("x",)), (None, None, "x", None))
    torch.testing.assert_close(
        F.interpolate(split, size=(16, 16), mode="bilinear").cpu(), want, equal_nan=True
    )
