"""Attention layers of evaluation against CPU torch: masks of every kind, weights, both norms."""

from __future__ import annotations

import torch

from tests.torch_bridge.lowerings.harness import together

aten = torch.ops.aten
BATCH, TIME, WIDTH, HEADS = 2, 5, 8, 2
PADDING = torch.tensor([[False] * TIME, [False] * 3 + [True] * 2])
CAUSAL = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


def source(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> tuple[torch.Tensor, ...]:
    shapes = ((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,))
    return tuple(source(*shape, seed=n) * 0.3 for n, shape in enumerate(shapes))


def test_attention_and_its_parts():
    """Masks of every kind; with weights, of one head or their average, and without."""
    x, scores = source(BATCH, TIME, WIDTH), source(BATCH, HEADS, TIME, TIME)
    each = source(*scores.shape, seed=1) > 0.5
    given = (x, x, x, WIDTH, HEADS, *weights())
    with together() as check:
        check(aten._transform_bias_rescale_qkv.default, source(2, 5, 24), source(24), HEADS)
        for mask, kind in ((CAUSAL, 0), (PADDING, 1), (each, 2)):
            check(aten._masked_softmax.default, scores, mask, 3, kind)
        y = aten._masked_softmax(scores, each, 3, 2)
        grad = source(*scores.shape, seed=2)
        check(aten._masked_softmax_backward.default, grad, y, each, 3)
        for mask, average, kind in ((None, True, None), (CAUSAL, False, 0), (PADDING, True, 1)):
            options = mask, True, average, kind
            check(aten._native_multi_head_attention.default, *given, *options)
        check(aten._native_multi_head_attention.default, *given, None, False)
