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
    "fill": lambda x: torch.ops.aten.fill(x, 1.0),
    "index_fill": lambda x: x.index_fill(0, _first(x), 0.0),
    "index_put": lambda x: x.index_put((_first(x),), x[:1]),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "index_copy": lambda x: x.index_copy(0, _first(x), x[:1]),
    "rot90": lambda x: x.rot90(1, (0, -1)) if x.ndim > 1 else x.clone(),
    "rot270": lambda x: x.rot90(-1, (1, 0)) if x.ndim > 1 else x.clone(),
    "tril": lambda x: x.tril() if x.ndim > 1 else x.clone(),
    "logsigmoid": torch.nn.functional.logsigmoid,
    "triu": lambda x: x.triu(1) if x.ndim > 1 else x.clone(),
    "all": lambda x: torch.all(x, (), keepdim=True),
    "power": lambda x: 2.5**x,
}


@pytest.mark.parametrize("maker", _MAKERS.values(), ids=_MAKERS.keys())
def test_strides(maker):
    for name, layout in _LAYOUTS.items():
        want, got = (
            maker(torch.arange(64.0, device=device).as_strided(*layout))
            for device in ("cpu", "jax")
        )
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
        assert got[1:].storage_offset() == want[1:].storage_offset(), name


def test_the_part_behind_a_flip_of_one_element():
    for device in ("cpu", "jax"):
        flipped = torch.arange(4, device=device).reshape(2, 2)[::2, 0].flip(0)
        part = flipped[1:]
        assert (part.storage_offset(), part.shape) == (4, (0,))
        flipped += 5
        assert flipped.tolist() == [5]


_OF_TWO = {
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "rounded": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "heaviside": torch.heaviside,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "gcd": lambda x, y: torch.gcd(x.int(), y.int()),
    "lcm": lambda x, y: torch.lcm(x.int(), y.int()),
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}


def test_strides_of_two_operands():
    columns, pairs = torch.ones(5, 10).t(), []
    others = torch.tensor(2.0), torch.ones(10, 5, 1).transpose(1, 2), torch.ones(5)
    for number, other in enumerate(others):
        for name, function in [*_OF_TWO.items()][number % 2 :: 2]:
            want, got = function(columns, other), function(columns.to("jax"), other.to("jax"))
            assert got.stride() == want.stride(), name
            pairs.append((got, want))
    for got, want in pairs:
        torch.testing.assert_close(got.cpu(), want)


_SIGNALS = {
    "fft": lambda x: torch.fft.fft(x, dim=1),
    "rfft2": lambda x: torch.fft.rfft2(x, dim=(0, 2)),
    "irfftn": torch.fft.irfftn,
    "hfft": lambda x: torch.fft.hfft(x, dim=0),
    "ihfft2": lambda x: torch.fft.ihfft2(x, dim=(2, 1)),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "max_unpool": lambda x: torch.nn.functional.max_unpool2d(x[None], x[None].long() * 0, 2),
}


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_strides_of_transforms_and_norms(order):
    x = torch.randn(5, 6, 7).permute(order)
    there = x.to("jax")
    pairs = [(name, signal(there), signal(x)) for name, signal in _SIGNALS.items()]
    for name, got, want in pairs:
        assert got.stride() == want.stride(), name
        torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)


def test_a_copy_on_the_cpu_lies_as_the_tensor():
    for x in (torch.randn(3, 4).t(), torch.randn(2, 3, 4)[:, ::2].permute(2, 0, 1)):
        there = torch.empty_strided(x.shape, x.stride(), device="jax").copy_(x)
        assert there.cpu().stride() == x.clone().stride()
        assert there.to("cpu", torch.float64).stride() == x.double().stride()
        format = torch.contiguous_format
        assert there.to("cpu", memory_format=format).is_contiguous()
        torch.testing.assert_close(there.cpu(), x)
