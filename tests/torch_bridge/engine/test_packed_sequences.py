"""Packed sequences through recurrent layers, against CPU torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import isoshard.torch_bridge  # noqa: F401  (registers the device)

ROWS = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


def test_lstm():
    torch.manual_seed(0)
    layer = nn.LSTM(4, 6, batch_first=True)
    got = []
    for module, device in ((layer, "cpu"), (copy.deepcopy(layer).to("jax"), "jax")):
        leaf = ROWS.detach().to(device).requires_grad_()
        packed = pack_padded_sequence(
            leaf, torch.tensor([2, 5, 1]), batch_first=True, enforce_sorted=False
        )
        out, (hidden, _) = module(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        (padded.square().sum() + hidden.sum()).backward()
        got.append([padded.detach().cpu(), hidden.detach().cpu(), leaf.grad.cpu(), sizes.cpu()])
    torch.testing.assert_close(got[1], got[0], rtol=1e-4, atol=1e-5)


def test_refusals():
    for lengths, message in (
        (torch.tensor([5, 3]), r"got 2 \(batch_size=3\)"),
        (torch.tensor([5, 0, 0]), "has to be greater than 0"),
        (torch.tensor([3, 5, 1]), "must be sorted in decreasing order"),
        (torch.tensor([5, 3, 1]).to("jax"), "should be a 1D CPU int64 tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch._VF._pack_padded_sequence(ROWS.to("jax"), lengths, True)
