import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate
from tests.torch_bridge.lowerings.samples import EMPTY, FLOATS, HALVES, INF, INTS, SCALAR

aten = torch.ops.aten
dtypes = pytest.mark.parametrize("dtype", [None, torch.float32, torch.int64, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("size", [[2, 3], [], [0, 4]], ids=["2d", "0d", "empty"])
def test_constants(size, dtype):
    check(aten.zeros.default, size, dtype=dtype)
    check(aten.ones.default, size, dtype=dtype)
    check(aten.full.default, size, 3, dtype=dtype)
    check(aten.full.default, size, 2.5, dtype=dtype)
    check(aten.new_ones.default, INTS, size, dtype=dtype)
    check(aten.new_zeros.default, HALVES, size, dtype=dtype)
    check(aten.new_full.default, FLOATS, size, 7, dtype=dtype)


def test_constants_of_other_dtypes():
    check(aten.full.default, [2], True)
    check(aten.full.default, [2], -INF)
    check(aten.full.default, [2], 1 + 2j)
    check(aten.scalar_tensor.default, 2.5)
    check(aten.scalar_tensor.default, 3, dtype=torch.float32)


@dtypes
@pytest.mark.parametrize("like", [FLOATS, INTS, SCALAR, EMPTY], ids=["float", "int", "0d", "empty"])
def test_likes(like, dtype):
    check(aten.zeros_like.default, like, dtype=dtype)
    check(aten.ones_like.default, like, dtype=dtype)
    check(aten.full_like.default, like, 2.5, dtype=dtype)


def test_a_bound_of_int64_is_held():
    got = evaluate(aten.full.default, [2], torch.iinfo(torch.int64).max)[0]
    np.testing.assert_array_equal(got, [2**63 - 1] * 2)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.empty.memory_format, ([2, 3],)),
        (aten.empty_strided.default, ([2, 3], [1, 2])),
        (aten.empty_permuted.default, ([2, 3], [1, 0])),
        (aten.empty_like.default, (INTS,)),
        (aten.new_empty.default, (INTS, [2])),
        (aten.new_empty_strided.default, (INTS, [2, 3], [1, 2])),
    ],
)
def test_new_memory_is_zero(op, args):
    assert not np.asarray(evaluate(op, *args)[0]).any()


@dtypes
def test_identities(dtype):
    check(aten.eye.default, 3, dtype=dtype)
    check(aten.eye.m, 2, 4, dtype=dtype)


@dtypes
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("default", (5,)),
        ("default", (0,)),
        ("default", (3.5,)),
        ("start", (-2, 3)),
        ("start_step", (1, 10, 3)),
        ("start_step", (5, -4, -2)),
        ("start_step", (2, 4, 1.0)),
    ],
)
def test_ranges(name, args, dtype):
    check(getattr(aten.arange, name), *args, dtype=dtype)


def test_fractional_ranges():
    check(aten.arange.start_step, 0.5, 2.6, 0.25)
    check(aten.arange.start_step, 0, 1, 0.1)
    check(aten.arange.start_step, 1.0, 0.0, -0.3)


@dtypes
@pytest.mark.parametrize("args", [(0, 10, 5), (1.5, -3.5, 4), (-2, 3, 1), (0, 1, 0), (0, 7, 8)])
def test_spaces(args, dtype):
    half = dtype == torch.bfloat16  # of 8 bits: near 0 they are those of the ends
    check(aten.linspace.default, *args, dtype=dtype, rtol=3e-2 if half else 2e-5)
    exponents = args[0] * 1.0, args[1] * 0.5, args[2]
    check(aten.logspace.default, *exponents, 2.0, dtype=dtype, rtol=1e-2 if half else 2e-5)


def test_spaces_between_tensors():
    check(aten.linspace.Tensor_Tensor, SCALAR, SCALAR * 2, 4)
    check(aten.linspace.Scalar_Tensor, 1, SCALAR, 4)
    check(aten.linspace.Tensor_Scalar, SCALAR, 4, 4)


@pytest.mark.parametrize("offset", [-1, 0, 2])
def test_triangle_places(offset):
    check(aten.tril_indices.default, 3, 4, offset)
    check(aten.triu_indices.default, 4, 3, offset)


def test_factories_that_write_into_a_part_of_their_result():
    for size in (1, 4, 5):
        torch.testing.assert_close(
            torch.fft.fftfreq(size, device="jax").cpu(), torch.fft.fftfreq(size)
        )
    out = torch.zeros(6, device="jax")
    torch.arange(3, out=out[2:2])
    assert out.tolist() == [0, 0, 0, 1, 2, 0]


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_kaiser_window(size, periodic):
    want = torch.kaiser_window(size, periodic, 7.0)
    torch.testing.assert_close(torch.kaiser_window(size, periodic, 7.0, device="jax").cpu(), want)


def test_assertions_read_their_condition():
    torch._assert_async(torch.ones((), device="jax"))
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        torch._assert_async(torch.zeros((), device="jax"))
