"""Tensors made of nothing against CPU torch: constants, ranges, windows, uninitialised memory."""

import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import evaluate, evaluate_all, together
from tests.torch_bridge.lowerings.samples import EMPTY, INF, INTS, SCALAR

aten = torch.ops.aten


def test_constants():
    with together() as check:
        for dtype in (None, torch.float32, torch.int64, torch.bfloat16):
            for size in ([2, 3], [0, 4]):
                check(aten.full.default, size, 2.5, dtype=dtype)
                check(aten.new_ones.default, INTS, size, dtype=dtype)
            for like in (INTS, SCALAR, EMPTY):
                check(aten.full_like.default, like, 2.5, dtype=dtype)
            check(aten.eye.m, 2, 4, dtype=dtype)
            for args in ((1, 10, 3), (5, -4, -2), (2, 4, 1.0)):
                check(aten.arange.start_step, *args, dtype=dtype)
            near = {"rtol": 3e-2} if dtype == torch.bfloat16 else {}  # near 0 as at the ends
            for start, end, steps in ((0, 10, 5), (1.5, -3.5, 4), (-2, 3, 1), (0, 1, 0)):
                check(aten.linspace.default, start, end, steps, dtype=dtype, **near)
                exponents = start * 1.0, end * 0.5, steps, 2.0
                check(aten.logspace.default, *exponents, dtype=dtype, **near)
        for value in (True, -INF, 1 + 2j, 3):
            check(aten.full.default, [2], value)
        check(aten.scalar_tensor.default, 3, dtype=torch.float32)
        check(aten.arange.start_step, 0.5, 2.6, 0.25)
        check(aten.arange.start_step, 1.0, 0.0, -0.3)
        check(aten.arange.default, 3.5)
        check(aten.linspace.Scalar_Tensor, 1, SCALAR, 4)
        check(aten.linspace.Tensor_Scalar, SCALAR, 4, 4)
        for offset in (-1, 0, 2):
            check(aten.tril_indices.default, 3, 4, offset)
            check(aten.triu_indices.default, 4, 3, offset)
    got = evaluate(aten.full.default, [2], torch.iinfo(torch.int64).max)[0]
    np.testing.assert_array_equal(got, [2**63 - 1] * 2)


def test_new_memory_is_zero():
    calls = (
        (aten.empty.memory_format, ([2, 3],)),
        (aten.empty_strided.default, ([2, 3], [1, 2])),
        (aten.empty_permuted.default, ([2, 3], [1, 0])),
        (aten.empty_like.default, (INTS,)),
        (aten.new_empty.default, (INTS, [2])),
        (aten.new_empty_strided.default, (INTS, [2, 3], [1, 2])),
    )
    for (made,), call in zip(evaluate_all([(*c, {}) for c in calls]), calls, strict=True):
        assert not np.asarray(made).any(), call


def test_factories_that_write_into_a_part_of_their_result():
    for size in (1, 4, 5):
        torch.testing.assert_close(
            torch.fft.fftfreq(size, device="jax").cpu(), torch.fft.fftfreq(size)
        )
    out = torch.zeros(6, device="jax")
    torch.arange(3, out=out[2:2])
    assert out.tolist() == [0, 0, 0, 1, 2, 0]


@pytest.mark.parametrize("size", [0, 1, 5])
def test_kaiser_window(size):
    for periodic in (True, False):
        got, want = (torch.kaiser_window(size, periodic, 7.0, device=d) for d in ("jax", "cpu"))
        torch.testing.assert_close(got.cpu(), want)


def test_assertions_read_their_condition():
    torch._assert_async(torch.ones((), device="jax"))
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        torch._assert_async(torch.zeros((), device="jax"))
