"""Histograms, distances and reductions of segments against CPU torch."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import as_cpu, together

aten = torch.ops.aten


def test_histograms():
    """By edges, weights and densities, in several dimensions, of nothing."""
    numbers = torch.tensor([-1.0, 0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 2.0, 3.5])
    edges = torch.tensor([-0.5, 0.25, 0.5, 2.0])
    points = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0))
    with together() as check:
        for span in ((0, 0), (0, 1), (5, 9)):
            check(aten.histc.default, numbers, 4, *span)
        check(aten.histc.default, torch.ones(5), 4, 0, 0)
        check(aten.histc.default, torch.ones(0), 4, 0, 0)
        check(aten.histc.default, torch.tensor([float("nan"), 0.5]), 4, 0, 1)
        check(aten.histogram.bin_ct, torch.ones(0), 3)
        check(aten._histogramdd_bin_edges.default, points, [2, 3, 4])
        heavy = torch.arange(9.0) + 1
        for density, weight, span in ((False, heavy, None), (True, None, [0.0, 1.0])):
            options = {"weight": weight, "density": density}
            check(aten.histogram.bin_ct, numbers, 4, range=span, **options)
        check(aten.histogram.bins_tensor, numbers, edges, weight=heavy, density=True)
        options = {"weight": torch.arange(20.0).reshape(4, 5), "density": True}
        check(aten._histogramdd_from_bin_cts.default, points, [2, 3, 4], **options)
        axes = [torch.linspace(0, 1, n) for n in (2, 4, 3)]
        check(aten._histogramdd_from_bin_tensors.default, points, axes, weight=options["weight"])


def points(rows: int, *lead: int) -> torch.Tensor:
    """The first row is the origin in every set, so that one distance is 0."""
    x = torch.randn(*lead, rows, 3, generator=torch.Generator().manual_seed(rows))
    x[..., 0, :] = 0
    return x


def test_distances_and_their_gradients():
    """By a matrix product or not, of batches, of nothing."""
    product = "use_mm_for_euclid_dist"
    ways = product, f"{product}_if_necessary", f"donot_{product}"
    cases = {}
    for p in (0.0, 1.0, 1.5, 2.0, 3.0, float("inf")):
        cdist = lambda a, b, p=p: torch.cdist(a, b, p)  # noqa: E731
        cases[f"between {p}"] = (cdist, points(4, 2), points(5, 2))
    for p in (0.0, 2.0, float("inf")):
        cases[f"within {p}"] = (lambda x, p=p: torch.pdist(x, p), points(5))
    for way, rows in ((ways[0], 4), (ways[1], 30), (ways[2], 30)):
        cdist = lambda a, b, way=way: torch.cdist(a, b, compute_mode=way)  # noqa: E731
        cases[f"{way} {rows}"] = (cdist, points(rows) + 1, points(5))
    for one, other in (
        ((5, 3), (2, 4, 3)),
        ((0, 5, 3), (4, 3)),
        ((5, 0), (4, 0)),
        ((0, 3), (5, 3)),
    ):
        cases[f"{one} {other}"] = (torch.cdist, torch.randn(one), torch.randn(other))
    cases["one point"] = (torch.pdist, points(1))
    cases["of no coordinates"] = (torch.pdist, torch.zeros(4, 0))
    as_cpu(cases, rtol=1e-3, atol=1e-3)


def test_segments():
    """By lengths and offsets, empty ones, ties, zeros; rows with segments of their own."""
    data = torch.tensor([[1.0, 2.0], [0.0, -3.0], [4.0, 4.0], [4.0, 0.0], [-1.0, 0.0], [2.0, 5.0]])
    lengths, offsets = torch.tensor([1, 0, 3, 2]), torch.tensor([0, 1, 1, 4, 6])
    back = aten._segment_reduce_backward.default
    with together() as check:
        for reduce in ("sum", "mean", "max", "min", "prod"):
            ways = [{"lengths": lengths, "initial": 0.5}, {"offsets": offsets}]
            chosen = ways if reduce in ("sum", "min") else [ways[reduce == "max"]]
            for given in chosen:
                check(aten.segment_reduce.default, data, reduce, **given, unsafe=True)
                out = aten.segment_reduce(data, reduce, **given, unsafe=True)
                grad = torch.arange(8.0).reshape(4, 2) + 1
                check(back, grad, out, data, reduce, **given)
        rows, each = data.reshape(3, 2, 2), torch.tensor([[1, 1], [2, 0], [0, 2]])
        options = {"lengths": each, "axis": 1, "unsafe": True}
        check(aten.segment_reduce.default, rows, "mean", **options)
    with pytest.raises(RuntimeError, match="Either lengths or offsets must be defined"):
        aten.segment_reduce(data.to("jax"), "sum")
