"""Attention layers of evaluation against CPU torch: masks of every kind, weights, both norms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
BATCH, TIME, WIDTH, HEADS = 2, 5, 8, 2
PADDING = torch.tensor([[False] * TIME, [False] * 3 + [True] * 2])
CAUSAL = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


def source(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("mask", "kind"), [(CAUSAL, 0), (PADDING, 1), (None, 2)])
def test_masked_softmax(mask, kind):
    x = source(BATCH, HEADS, TIME, TIME)
    mask = source(*x.shape, seed=1) > 0.5 if mask is None else mask
    check(aten._masked_softmax.default, x, mask, 3, kind)
    if kind == 2:
        y = aten._masked_softmax(x, mask, 3, kind)
        check(aten._masked_softmax_backward.default, source(*x.shape, seed=2), y, mask, 3)


def test_split_heads():
    check(aten._transform_bias_rescale_qkv.default, source(2, 5, 24), source(24), HEADS)


def weights() -> tuple[torch.Tensor, ...]:
    shapes = ((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,))
    return tuple(source(*shape, seed=n) * 0.3 for n, shape in enumerate(shapes))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("mask", "kind"), [(None, None), (CAUSAL, 0), (PADDING, 1)])
def test_multi_head_attention(mask, kind, average):
    x = source(BATCH, TIME, WIDTH)
    arguments = (x, x, x, WIDTH, HEADS, *weights(), mask, True, average, kind)
    check(aten._native_multi_head_attention.default, *arguments)


def test_attention_without_weights():
    x = source(BATCH, TIME, WIDTH)
    arguments = (x, x, x, WIDTH, HEADS, *weights(), None, False)
    check(aten._native_multi_head_attention.default, *arguments)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_in_evaluation(norm_first, activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, batch_first=True, norm_first=norm_first, activation=activation
    ).eval()
    moved, x = copy.deepcopy(layer).to("jax"), source(BATCH, TIME, WIDTH)
    with torch.no_grad():
        got = moved(x.to("jax"), src_key_padding_mask=PADDING.to("jax")).cpu()
        want = layer(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
