"""Packed sequences: rows of unlike lengths, step after step, for `nn.LSTM` and its kin.

torch demands lengths on the CPU, sorted from the longest, and gives the number of rows per step
back on the CPU. So everything but the elements is known when it is recorded.

>>> import torch
>>> rows = torch.tensor([[1, 2, 3], [4, 0, 0]]).to("jax")
>>> packed = torch.nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([3, 1]), batch_first=True)
>>> packed.data.tolist(), packed.batch_sizes.tolist()
([1, 4, 2, 3], [2, 1, 1])
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor

from . import dispatch

_PACK = torch.ops.aten._pack_padded_sequence.default


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, lengths, batch_first = args
    if isinstance(lengths, lazy_tensor.LazyTensor):
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but it is on "
            f"{naming.current()}; give "
            "lengths.cpu()"
        )
    sizes = [int(length) for length in lengths]
    batch = rows.shape[0 if batch_first else 1]
    if len(sizes) != batch:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(sizes)} (batch_size="
            f"{batch})"
        )
    if min(sizes) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element")
    if sizes != sorted(sizes, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True"
        )
    steps = torch.arange(sizes[0])
    inside = torch.tensor(sizes)[None] > steps[:, None]
    places = torch.arange(sizes[0] * batch).reshape(sizes[0], batch)[inside]
    by_time = torch.ops.aten.transpose.int(rows, 0, 1) if batch_first else rows
    flat = torch.ops.aten.reshape.default(by_time, [-1, *by_time.shape[2:]])
    packed = torch.ops.aten.index_select.default(flat, 0, places.to("jax"))
    return packed, inside.sum(1)


dispatch.SPECIAL[_PACK.name()] = _pack
