"""Convolutions of images and kernels that are split over a mesh, forward and backward.

JAX alone gives wrong numbers for most of these, or ends the process.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh

PLAIN = {
    "padded": (F.conv2d, {"padding": 1}, (2, 3, 8, 16), (4, 3, 3, 3)),
    "dilated": (F.conv2d, {"padding": 2, "dilation": 2, "groups": 2}, (2, 4, 8, 16), (4, 2, 3, 3)),
    "strided": (F.conv2d, {"padding": 1, "stride": 2}, (2, 3, 8, 16), (4, 3, 3, 3)),
    "transposed": (
        F.conv_transpose2d,
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        (2, 4, 8, 16),
        (4, 2, 3, 3),
    ),
}
OVER_A_PART, OVER_ALL = P(None, None, "y", None), P(None, None, "x", "y")

# The same operations are compiled once per layout, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


def compare(function, options, shapes, specs) -> None:
    source = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=source) for shape in shapes]
    mesh, got = make_mesh((2, 4), ("x", "y")), []
    for split in (False, True):
        moved = [
            (iso.shard(leaf, mesh, spec) if split else leaf.detach()).requires_grad_()
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        out = function(*moved, **options)
        out.sin().sum().backward()
        got.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in moved)])
    torch.testing.assert_close(got[1], got[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, OVER_A_PART) for name in PLAIN), ("padded", OVER_ALL)],
    ids=str,
)
def test_split_images(name, layout):
    function, options, image, kernel = PLAIN[name]
    compare(function, options, (image, kernel), (layout, P()))


@pytest.mark.parametrize(
    ("stride", "side", "reach", "spec"),
    [(1, 9, 3, ("channels",)), (2, 15, 2, ("x", None, "y")), (1, 9, 3, ("x", "y", None))],
)
def test_results_that_are_split_along_channels_too(stride, side, reach, spec):
    source = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, side, side, generator=source)
    kernel = torch.randn(8, 2, reach, reach, generator=source)
    results = []
    for marked in (False, True):
        leaves = [t.to("jax").requires_grad_() for t in (image, kernel)]
        out = F.conv2d(F.pad(leaves[0] * 2, (0, 1, 0, 1)), leaves[1], stride=stride)
        if marked and spec != ("channels",):
            xs.mark_sharding(out, make_mesh((4, 2), ("x", "y")), (None, *spec))
        elif marked:
            xs.mark_sharding(out, make_mesh((8,), ("x",)), (None, "x", None, None))
        out.sin().sum().backward()
        results.append([t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "image", "kernel"),
    [
        ({"stride": 2, "dilation": 2}, (1, 1, 4), (1, 1, 4)),
        ({"stride": 3, "dilation": 4, "groups": 2}, (2, 2, 4), (2, 2, 4)),
    ],
)
def test_split_kernels(options, image, kernel):
    both = P(None, None, "y"), P(None, None, "y")
    compare(F.conv_transpose1d, options, (image, kernel), both)
