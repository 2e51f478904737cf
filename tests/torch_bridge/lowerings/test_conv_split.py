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
    "padded": (F.conv2d, {"padding": 1}, ((2, 3, 8, 16), (4, 3, 3, 3))),
    "dilated": (
        F.conv2d,
        {"padding": 2, "dilation": 2, "groups": 2},
        ((2, 4, 8, 16), (4, 2, 3, 3)),
    ),
    "strided": (F.conv2d, {"padding": 1, "stride": 2}, ((2, 3, 8, 16), (4, 3, 3, 3))),
    "transposed": (
        F.conv_transpose2d,
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        ((2, 4, 8, 16), (4, 2, 3, 3)),
    ),
}
SPLIT = P(None, None, "y")
OVER_A_PART, OVER_ALL = P(None, None, "y", None), P(None, None, "x", "y")


def run(function, options, shapes, place=lambda n, leaf: leaf):
    """The result and the gradients of operands where they are placed; on the CPU."""
    source = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=source) for shape in shapes]
    leaves = [place(n, leaf).requires_grad_() for n, leaf in enumerate(leaves)]
    out = function(*leaves, **options)
    out.sin().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def compare(found):
    """Results of one program and those of the CPU, each with a name."""
    for name, got, want in found:
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                one.cpu(),
                other,
                rtol=1e-3,
                atol=1e-3,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def split(cases, specs):
    """Cases as one program against the CPU: a function, options, shapes."""
    mesh = make_mesh((2, 4), ("x", "y"))
    place = lambda n, leaf: iso.shard(leaf, mesh, specs[n])  # noqa: E731
    compare([(name, run(*case, place), run(*case)) for name, case in cases.items()])


@pytest.mark.parametrize("layout", [OVER_A_PART, OVER_ALL], ids=str)
def test_split_images(layout):
    split(PLAIN if layout is OVER_A_PART else {"padded": PLAIN["padded"]}, (layout, P()))


def padded(image, kernel, stride):
    return F.conv2d(F.pad(image * 2, (0, 1, 0, 1)), kernel, stride=stride)


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((8,), [(1, 9, 3, (None, "x", None, None))]),
        ((4, 2), [(2, 15, 2, (None, "x", None, "y")), (1, 9, 3, (None, "x", "y", None))]),
    ],
    ids=str,
)
def test_results_that_are_split_along_channels_too(shape, cases):
    mesh, found = make_mesh(shape, ("x", "y")[: len(shape)]), []
    for stride, side, reach, spec in cases:
        case = {"stride": stride}, ((1, 2, side, side), (8, 2, reach, reach))
        mark = lambda out, spec=spec: xs.mark_sharding(out, mesh, spec)  # noqa: E731
        marked = lambda *given, mark=mark, **options: mark(padded(*given, **options))  # noqa: E731
        got = run(marked, *case, lambda n, leaf: leaf.to("jax"))
        found.append((spec, got, run(padded, *case)))
    compare(found)


def test_split_kernels():
    cases = {
        "one": ({"stride": 2, "dilation": 2}, ((1, 1, 4),) * 2),
        "groups": ({"stride": 3, "dilation": 4, "groups": 2}, ((2, 2, 4),) * 2),
    }
    split({name: (F.conv_transpose1d, *case) for name, case in cases.items()}, (SPLIT, SPLIT))
