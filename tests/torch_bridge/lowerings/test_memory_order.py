"""Strides of results, where torch's functions for `meta` tensors differ from its CPU kernels."""

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (the device)

# Shape and strides of a view of 64 numbers.
_LAYOUTS = {
    "one element of a column": ((1,), (16,)),
    "one row": ((1, 4), (64, 1)),
    "corner": ((1, 1), (64, 16)),
    "row turned": ((4, 1), (1, 9)),
    "every other of a row turned": ((4, 1), (2, 9)),
    "wide gap": ((2, 3), (3, 6)),
    "columns first": ((2, 3), (1, 2)),
    "overlap": ((2, 3), (1, 1)),
    "longer row than memory": ((2, 3), (1, 3)),
    "axis of one in between": ((4, 1, 4), (1, 4, 16)),
    "repeated": ((2, 3), (0, 1)),
}


def _first(x):
    return torch.zeros(1, dtype=torch.int64, device=x.device)


_MAKERS = {
    "flip": lambda x: x.flip(0),
    "flip_all": lambda x: x.flip(tuple(range(x.ndim))),
    "zeros_like": torch.zeros_like,
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int32),
    "empty_like": torch.empty_like,
    "full_like": lambda x: torch.full_like(x, 2.0),
    "like_contiguous": lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3),
    "fill": lambda x: torch.ops.aten.fill(x, 1.0),
    "index_fill": lambda x: x.index_fill(0, _first(x), 0.0),
    "index_fill_tensor": lambda x: x.index_fill(-1, _first(x), x.new_zeros(())),
    "index_put": lambda x: x.index_put((_first(x),), x[:1]),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "index_copy": lambda x: x.index_copy(0, _first(x), x[:1]),
    "rot90": lambda x: x.rot90(1, (0, -1)) if x.ndim > 1 else x.clone(),
    "rot180": lambda x: x.rot90(2, (0, 1)) if x.ndim > 1 else x.clone(),
    "rot270": lambda x: x.rot90(-1, (1, 0)) if x.ndim > 1 else x.clone(),
    "rot360": lambda x: x.rot90(4, (0, 1)) if x.ndim > 1 else x.clone(),
    "tril": lambda x: x.tril() if x.ndim > 1 else x.clone(),
    "logsigmoid": torch.nn.functional.logsigmoid,
    "triu": lambda x: x.triu(1) if x.ndim > 1 else x.clone(),
}


@pytest.mark.parametrize("maker", _MAKERS.values(), ids=_MAKERS.keys())
@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS.keys())
def test_strides(maker, layout):
    want, got = (
        maker(torch.arange(64.0, device=device).as_strided(*layout)) for device in ("cpu", "jax")
    )
    assert got.stride() == want.stride()
    assert got.shape == want.shape
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got[1:].storage_offset() == want[1:].storage_offset()


def test_the_part_behind_a_flip_of_one_element():
    for device in ("cpu", "jax"):
        flipped = torch.arange(4, device=device).reshape(2, 2)[::2, 0].flip(0)
        part = flipped[1:]
        assert (part.storage_offset(), part.shape) == (4, (0,))
        flipped += 5
        assert flipped.tolist() == [5]


def test_bools_filled_at_an_index_keep_their_columns_first():
    made = [
        torch.tensor([True, False, True, True] * 4, device=device)
        .as_strided((2, 3), (1, 3), 0)
        .index_fill(0, torch.tensor([0], device=device), 0)
        for device in ("cpu", "jax")
    ]
    assert made[1].stride() == made[0].stride() == (1, 2)
    assert made[1].tolist() == made[0].tolist()
