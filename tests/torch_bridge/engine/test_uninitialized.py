"""torch's deterministic mode: what it fills new memory with, and which operators it refuses."""

import contextlib

import pytest
import torch
from torch.utils import deterministic

import isoshard.torch_bridge as xs


@contextlib.contextmanager
def deterministically(fill):
    before = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


def grown(dtype, device):
    return torch.ones(2, 3, dtype=dtype, device=device).resize_(4, 3)


FACTORIES = {
    "empty": lambda dtype, device: torch.empty(2, 3, dtype=dtype, device=device),
    "empty_like": lambda dtype, device: torch.empty_like(torch.ones(2, dtype=dtype, device=device)),
    "empty_strided": lambda dtype, device: torch.empty_strided(
        (2, 3), (1, 2), dtype=dtype, device=device
    ),
    "empty_permuted": lambda dtype, device: torch.empty_permuted(
        (2, 3), (1, 0), dtype=dtype, device=device
    ),
    "new_empty": lambda dtype, device: torch.ones(1, device=device).new_empty(2, dtype=dtype),
    "resize_": grown,
}
DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_memory_is_filled_as_on_the_cpu(make, dtype):
    with deterministically(fill=True):
        want, got = FACTORIES[make](dtype, "cpu"), FACTORIES[make](dtype, "jax")
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert got.stride() == want.stride()


def test_it_is_zeros_where_nobody_asks():
    with deterministically(fill=False):
        assert torch.empty(3, device="jax").tolist() == [0, 0, 0]
    assert torch.empty(3, device="jax").tolist() == [0, 0, 0]
    with deterministically(fill=True):
        assert torch.zeros(3, device="jax").tolist() == [0, 0, 0]
        assert torch.zeros_like(torch.ones(2, device="jax")).tolist() == [0, 0]


def test_median_and_histogram_are_deterministic_here():
    x = torch.tensor([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]])
    with deterministically(fill=True):
        values, places = x.to("jax").median(1)
        assert values.tolist() == [2, 5]
        assert places.tolist() == [2, 2]
        assert x.to("jax").nanmedian(1)[0].tolist() == [2, 5]
        assert torch.histc(x.to("jax"), 5).tolist() == torch.histc(x, 5).tolist()


def test_a_captured_step_sees_whether_to_fill():
    step = xs.compile(lambda: torch.empty(3, device="jax"))
    for fill in (True, True, False, False, True):
        with deterministically(fill):
            assert bool(step().isnan().all()) is fill
