"""Reductions and scans against CPU torch: axes, dtypes, special values, and split axes."""

import pytest
import torch

import isoshard as iso
from isoshard import P
from tests.torch_bridge.lowerings.harness import together
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    BYTES,
    COMPLEX,
    CUBE,
    EMPTY,
    FLOATS,
    HALVES,
    INF,
    INTS,
    NAN,
    SCALAR,
    SPECIAL,
    TIES,
)

aten = torch.ops.aten


def test_sums_and_means():
    with together() as check:
        for name in ("sum", "prod", "nansum", "all", "any"):
            for values in (FLOATS, INTS, BOOLS, SCALAR, EMPTY):
                check(getattr(aten, name).default, values)
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
            for dim in ([], [-1], [0, 2], [1]):
                check(op, CUBE, dim, dim != [1])
            check(op, CUBE, [1])
        check(aten.nansum.default, TIES, [0])
        check(aten.nansum.default, TIES, None, True)
        check(aten.sum.default, COMPLEX)
        # Sums of small types are wide.
        check(aten.sum.default, BYTES)
        check(aten.sum.dim_IntList, BOOLS, [1])
        check(aten.sum.default, HALVES.repeat(40, 1), rtol=1e-2)
        check(aten.sum.dim_IntList, INTS, [0], dtype=torch.float32)
        check(aten.prod.dim_int, INTS, -1, True)
        check(aten.mean.default, HALVES, rtol=1e-2)
        check(aten.mean.dim, INTS, [0], dtype=torch.float32)
        check(aten.mean.dim, EMPTY, [0])
        for op in (aten.sum.default, aten.mean.default):
            check(op, torch.arange(40.0) / 7, dtype=torch.bfloat16)
        for op in (aten.sum.default, aten.prod.default):
            check(op, torch.tensor([-3.5, 2.0, 1.0]), dtype=torch.uint8)


def test_truth_and_counts():
    parts = torch.tensor([[0j, 1j, 1j], [0j, 1, 0j], [0j, NAN, complex(0, NAN)]])
    with together() as check:
        for packet in (aten.all, aten.any):
            check(packet.dim, INTS, 0, True)
            check(packet.dims, CUBE, None, True)
            check(packet.dims, INTS, [])
            check(packet.default, BYTES)
            check(packet.default, SPECIAL)
            for dim in (0, 1):  # not zero for either part
                check(packet.dim, parts, dim)
                check(aten.count_nonzero.dim_IntList, parts, [dim])


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_variances():
    values = torch.tensor([[1 + 1j, 2j, 1j], [3, 4j, 1j], [1j, 2, 1j]])
    with together() as check:
        for name in ("var", "std", "var_mean", "std_mean"):
            op = getattr(aten, name).correction
            check(op, CUBE)
            check(op, CUBE, [-1], correction=0, keepdim=True)
            check(op, CUBE, [0, 2], correction=2)
            check(op, FLOATS[:, :1], [1])
            check(op, COMPLEX, [0])
            check(op, HALVES, [1], rtol=1e-2)
            for correction in (0, 3):
                check(op, values, [1], correction=correction)  # of both parts


def test_extremes():
    with together() as check:
        for name in ("max", "min"):
            packet, places = getattr(aten, name), getattr(aten, "arg" + name).default
            check(packet.default, SPECIAL)
            check(packet.dim, TIES, 1)
            check(packet.dim, CUBE, -2, True)
            check(packet.dim, SCALAR, 0)
            check(places, TIES, -1)
            check(places, CUBE, None, True)
            check(places, SCALAR, 0)
        check(aten.aminmax.default, TIES, dim=1, keepdim=True)
        check(aten.aminmax.default, INTS)


def test_norms():
    norm = aten.linalg_vector_norm.default
    with together() as check:
        for order in (0, 1, 2, 3, 0.5, INF, -INF):
            check(norm, CUBE, order)
            check(norm, CUBE, order, [0, -1], True)
            check(norm, COMPLEX, order, [1])
            check(aten.norm.Scalar, FLOATS, order)
        check(norm, HALVES, 3, [1], dtype=torch.float32, rtol=1e-2)
        check(aten.norm.ScalarOpt_dim, FLOATS, 3, [1])
        check(aten.norm.ScalarOpt_dim, FLOATS, None, [0], True)
        check(aten.norm.ScalarOpt_dtype, HALVES, 2, dtype=torch.float32, rtol=1e-2)
        check(norm, EMPTY)
        check(norm, SCALAR)
        check(aten.logsumexp.default, FLOATS * 100, [1])
        check(aten.logsumexp.default, INTS, [0, 1], True)
        check(aten.logsumexp.default, torch.tensor([[-INF, -INF], [INF, 0.0]]), [1])


def test_scans():
    low = complex("-inf+1j")
    large = torch.full((3, 2), 100, dtype=torch.int8)
    with together() as check:
        for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default):
            check(op, CUBE, -1, rtol=1e-4)
            check(op, CUBE, 1, rtol=1e-4)
            check(op, SCALAR, 0)
            check(op, EMPTY, 0)
            check(op, HALVES, 1, rtol=2e-2, atol=1e-2)
        for op in (aten.cumsum.default, aten.cumprod.default):
            check(op, large, 0)
            check(op, large.to(torch.uint8), 0)
            check(op, BOOLS, 1)
            check(op, INTS, 0, dtype=torch.float32)
        check(aten.cumsum.default, INTS, 0)
        check(aten.cumsum.default, torch.tensor([-3.5, 2.0]), 0, dtype=torch.uint8)
        check(aten.cummax.default, torch.zeros(0, 2, dtype=torch.complex64), 0)
        x = torch.tensor([low, low, 1j, 2 + 3j, complex("nan+0j"), 1])
        check(aten.logcumsumexp.default, x, 0)
        check(aten.logcumsumexp.default, x[:0], 0)


def test_complex_logcumsumexp_of_an_axis_that_is_split(mesh):
    x = torch.randn(4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)) * 3
    cases = ((P("x", "y"), 1), (P("y"), 0))
    found = [(dim, iso.shard(x.to("jax"), mesh, spec).logcumsumexp(dim)) for spec, dim in cases]
    for dim, got in found:
        torch.testing.assert_close(got.cpu(), x.logcumsumexp(dim), rtol=1e-4, atol=1e-5)


EXTREMES = {
    "amax": torch.amax,
    "amin": torch.amin,
    "max": lambda x: x.max(0)[0],
    "min": lambda x: x.min(0)[0],
    "aminmax": lambda x: torch.stack(tuple(x.aminmax())),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "smallest norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "foreach norm": lambda x: torch._foreach_norm([x], float("inf"))[0],
}


def test_nan_survives_extremes_over_devices():
    """JAX's reductions over devices lose it."""
    mesh = iso.make_mesh((8,), ("x",))
    numbers, found = torch.arange(16.0), []
    for x in (numbers, numbers.where(numbers != 7, torch.nan)):
        split = iso.shard(x, mesh, P("x"))
        found += [(name, one(split), one(x)) for name, one in EXTREMES.items()]
    for name, got, want in found:
        torch.testing.assert_close(got.cpu(), want, equal_nan=True, msg=f"{name} {want}")


def test_nan_survives_a_scatter_over_devices():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    source = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    source[3, 1] = source[9, 2] = torch.nan
    index = torch.arange(64).reshape(16, 4) * 5 % 8
    split = iso.shard(source, mesh, P(("x", "y")))
    found = [
        torch.zeros(8, 4).to("jax").scatter_reduce(0, index.to("jax"), split, reduce)
        for reduce in ("amax", "amin")
    ]
    for got, reduce in zip(found, ("amax", "amin"), strict=True):
        want = torch.zeros(8, 4).scatter_reduce(0, index, source, reduce)
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)
        assert want.isnan().sum() == 2


def test_a_hash_of_what_lies_on_several_devices():
    x = torch.randn(8, 3)
    split = iso.shard(x, iso.make_mesh((8,), ("x",)), P("x"))
    for dim, got in [(dim, torch.hash_tensor(split, dim)) for dim in ((), 0, 1)]:
        assert torch.equal(got.cpu(), torch.hash_tensor(x, dim))
