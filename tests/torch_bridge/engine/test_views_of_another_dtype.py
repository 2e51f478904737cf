"""Views that read memory as another dtype, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (makes the device)

Op = Callable[[torch.Tensor], Any]


def test_the_offset_of_a_view_counts_elements_of_its_own_dtype():
    def offsets(device):
        x = torch.arange(24, device=device).reshape(4, 6)
        parts = x.to(torch.complex64)[1:, 2:]
        halves = x.to(torch.int16)[2:]
        views = (
            parts.real,
            parts.imag,
            parts[1],
            halves.view(torch.uint8),
            halves.view(torch.int32),
        )
        return [view.storage_offset() for view in views]

    assert offsets("jax") == offsets("cpu")


OF_ANOTHER_DTYPE: dict[str, tuple[torch.dtype, Op]] = {
    "strides of another dtype": (
        torch.float32,
        lambda x: x.view(torch.int32).as_strided((3, 2), (2, 1), 2),
    ),
    "bytes of windows": (torch.float32, lambda x: x.unfold(0, 4, 2).view(torch.uint8)),
    "windows of bytes": (torch.float32, lambda x: x.view(torch.uint8).unfold(0, 8, 2)[1]),
    "words of windows of bytes": (
        torch.int8,
        lambda x: x.unfold(0, 8, 4)[1].view(torch.int32),
    ),
    "real parts of windows": (torch.complex64, lambda x: torch.view_as_real(x.unfold(0, 3, 1))[1]),
    "numbers of windows": (
        torch.float32,
        lambda x: torch.view_as_complex(x.unfold(0, 4, 2)[1].view(2, 2)),
    ),
    "nothing": (torch.uint8, lambda x: x.view(torch.int8).unfold(0, 2, 3)[:, 2:]),
}


@pytest.mark.parametrize("name", OF_ANOTHER_DTYPE)
def test_a_write_to_overlapping_memory_of_another_dtype(name):
    dtype, view = OF_ANOTHER_DTYPE[name]
    values = torch.arange(12).to(dtype)
    want, got = values.clone(), values.to("jax")
    for x in (want, got):
        part = view(x)
        part[...] = part.clone()
        assert torch.equal(x.cpu(), values)
        part[..., :1] = part[..., 1:2].clone()
    assert torch.equal(got.cpu(), want)
