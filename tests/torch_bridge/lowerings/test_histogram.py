"""Histograms against CPU torch: edges, weights, densities, several dimensions, nothing to count."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
NUMBERS = torch.tensor([-1.0, 0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 2.0, 3.5])


@pytest.mark.parametrize("span", [(0, 0), (0, 1), (-2, 3), (5, 9)])
def test_histc(span):
    check(aten.histc.default, NUMBERS, 4, *span)


def test_histc_of_equal_numbers_and_of_none():
    check(aten.histc.default, torch.ones(5), 4, 0, 0)
    check(aten.histc.default, torch.ones(0), 4, 0, 0)
    check(aten.histc.default, torch.tensor([float("nan"), 0.5]), 4, 0, 1)


@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("span", [None, [0.0, 1.0]])
@pytest.mark.parametrize("weighted", [False, True])
def test_histogram(weighted, span, density):
    weight = torch.arange(9.0) + 1 if weighted else None
    check(aten.histogram.bin_ct, NUMBERS, 4, range=span, weight=weight, density=density)
    edges = torch.tensor([-0.5, 0.25, 0.5, 2.0])
    check(aten.histogram.bins_tensor, NUMBERS, edges, weight=weight, density=density)


def test_histogram_of_nothing():
    check(aten.histogram.bin_ct, torch.ones(0), 3)


@pytest.mark.parametrize("density", [False, True])
def test_histogramdd(density):
    points = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(20.0).reshape(4, 5)
    check(aten._histogramdd_bin_edges.default, points, [2, 3, 4])
    options = {"weight": weight, "density": density}
    check(aten._histogramdd_from_bin_cts.default, points, [2, 3, 4], **options)
    edges = [torch.linspace(0, 1, n) for n in (2, 4, 3)]
    check(aten._histogramdd_from_bin_tensors.default, points, edges, **options)
