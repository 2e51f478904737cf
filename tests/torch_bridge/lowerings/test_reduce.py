import pytest
import torch

import isoshard as iso
from isoshard import P
from tests.torch_bridge.lowerings.harness import check
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

_OVERLOAD = {"all": "dim", "any": "dim", "count_nonzero": "dim_IntList"}
_VALUES = {"floats": FLOATS, "ints": INTS, "bools": BOOLS, "0-d": SCALAR, "empty": EMPTY}
_DIMS = {"all": [], "last": [-1], "outer": [0, 2], "kept": [1]}
values = pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES.keys())
dims = pytest.mark.parametrize("dim", _DIMS.values(), ids=_DIMS.keys())


@pytest.mark.parametrize("name", ["sum", "prod", "nansum", "all", "any"])
@values
def test_whole(name, values):
    check(getattr(aten, name).default, values)


@pytest.mark.parametrize("name", ["sum.dim_IntList", "mean.dim", "amax", "amin"])
@dims
@pytest.mark.parametrize("keepdim", [False, True])
def test_axes(name, dim, keepdim):
    packet, _, overload = name.partition(".")
    check(getattr(getattr(aten, packet), overload or "default"), CUBE, dim, keepdim)


def test_nan_counts_as_zero():
    check(aten.nansum.default, TIES, [0])
    check(aten.nansum.default, TIES, None, True)


@pytest.mark.parametrize("name", ["all", "any"])
def test_truth(name):
    packet = getattr(aten, name)
    check(packet.dim, BOOLS, -1)
    check(packet.dim, INTS, 0, True)
    check(packet.dims, BOOLS, [0, 1])
    check(packet.dims, CUBE, None, True)
    check(packet.dims, INTS, [])
    check(packet.default, BYTES)
    check(packet.default, SPECIAL)


@pytest.mark.parametrize("name", ["all", "any", "count_nonzero"])
def test_complex_numbers_are_not_zero_for_either_part(name):
    values = torch.tensor([[0j, 1j, 1j], [0j, 1, 0j], [0j, NAN, complex(0, NAN)]])
    for dim in (0, 1, None):
        op = getattr(getattr(aten, name), "default" if dim is None else _OVERLOAD[name])
        check(op, values, *(() if dim is None else ([dim] if "List" in op.name() else dim,)))


@pytest.mark.parametrize("name", ["all", "any"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_truth_along_no_axis_lies_in_row_major_order(name, keepdim):
    def truth(device):
        tensor = CUBE.to(device).permute(2, 0, 1)
        return getattr(torch, name)(tensor, (), keepdim=keepdim)

    assert truth("jax").stride() == truth("cpu").stride() == (6, 3, 1)
    assert truth("jax").tolist() == truth("cpu").tolist()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("correction", [0, 1, 3, 5])
def test_complex_variance_is_that_of_both_parts(name, correction):
    values = torch.tensor([[1 + 1j, 2j, 1j], [3, 4j, 1j], [1j, 2, 1j]])
    check(getattr(aten, name).correction, values, [0], correction=correction)
    check(getattr(aten, f"{name}_mean").correction, values, [1], correction=correction)


def test_sums_of_small_types_are_wide():
    check(aten.sum.default, BYTES)
    check(aten.sum.dim_IntList, BOOLS, [1])
    check(aten.sum.default, HALVES.repeat(40, 1), rtol=1e-2)
    check(aten.sum.dim_IntList, INTS, [0], dtype=torch.float32)
    check(aten.prod.dim_int, INTS, -1, True)
    check(aten.mean.default, HALVES, rtol=1e-2)
    check(aten.mean.dim, INTS, [0], dtype=torch.float32)
    check(aten.mean.dim, EMPTY, [0])
    check(aten.sum.default, COMPLEX)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_moments(name):
    op = getattr(aten, name).correction
    check(op, CUBE)
    check(op, CUBE, [-1], correction=0, keepdim=True)
    check(op, CUBE, [0, 2], correction=2)
    check(op, FLOATS[:, :1], [1])
    check(op, COMPLEX, [0])
    check(op, HALVES, [1], rtol=1e-2)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes(name):
    packet = getattr(aten, name)
    check(packet.default, INTS)
    check(packet.default, SPECIAL)
    check(packet.dim, TIES, 1)
    check(packet.dim, CUBE, -2, True)
    check(packet.dim, SCALAR, 0)
    check(getattr(aten, "arg" + name).default, TIES, -1)
    check(getattr(aten, "arg" + name).default, CUBE)
    check(getattr(aten, "arg" + name).default, CUBE, None, True)
    check(getattr(aten, "arg" + name).default, SCALAR, 0)
    check(aten.aminmax.default, TIES, dim=1, keepdim=True)
    check(aten.aminmax.default, INTS)


def test_counts_and_traces():
    check(aten.count_nonzero.default, INTS)
    check(aten.count_nonzero.dim_IntList, CUBE, [0, -1])
    check(aten.trace.default, FLOATS)
    check(aten.trace.default, INTS)


def test_logsumexp():
    check(aten.logsumexp.default, FLOATS * 100, [1])
    check(aten.logsumexp.default, INTS, [0, 1], True)
    check(aten.logsumexp.default, torch.tensor([[-INF, -INF], [INF, 0.0]]), [1])


@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, INF, -INF])
def test_norms(order):
    check(aten.linalg_vector_norm.default, CUBE, order)
    check(aten.linalg_vector_norm.default, CUBE, order, [0, -1], True)
    check(aten.linalg_vector_norm.default, COMPLEX, order, [1])
    check(aten.linalg_vector_norm.default, HALVES, order, [1], dtype=torch.float32, rtol=1e-2)
    check(aten.norm.Scalar, FLOATS, order)
    check(aten.norm.ScalarOpt_dim, FLOATS, order, [1])


def test_norm_defaults():
    check(aten.norm.ScalarOpt_dim, FLOATS, None, [0], True)
    check(aten.norm.ScalarOpt_dtype, HALVES, 2, dtype=torch.float32, rtol=1e-2)
    check(aten.linalg_vector_norm.default, EMPTY)
    check(aten.linalg_vector_norm.default, SCALAR)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_scans(name):
    op = getattr(aten, name).default
    check(op, CUBE, -1, rtol=1e-4)
    check(op, CUBE, 1, rtol=1e-4)
    check(op, SCALAR, 0)
    check(op, EMPTY, 0)
    check(op, HALVES, 1, rtol=2e-2, atol=1e-2)


def test_scans_of_integers():
    check(aten.cumsum.default, torch.full((5,), 100, dtype=torch.uint8), 0)
    check(aten.cumprod.default, torch.full((3,), 100, dtype=torch.int8), 0)
    check(aten.cumsum.default, INTS, 0)
    check(aten.cumsum.default, BOOLS, 1)
    check(aten.cumprod.default, BYTES[:3], 0)
    sevenths = torch.arange(40.0) / 7
    check(aten.sum.default, sevenths, dtype=torch.bfloat16)
    check(aten.mean.default, sevenths, dtype=torch.bfloat16)
    check(aten.cummax.default, torch.zeros(0, 2, dtype=torch.complex64), 0)
    for op in (aten.sum.default, aten.prod.default):
        check(op, torch.tensor([-3.5, 2.0, 1.0]), dtype=torch.uint8)
    check(aten.cumsum.default, torch.tensor([-3.5, 2.0]), 0, dtype=torch.uint8)
    large = torch.full((3, 2), 100, dtype=torch.int8)
    check(aten.cumsum.default, large, 0)
    check(aten.cumprod.default, large.to(torch.uint8), 0)
    check(aten.cumsum.default, INTS, 0, dtype=torch.float32)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", [P("x", "y"), P("y"), P(None, "x")])
def test_complex_logcumsumexp_of_an_axis_that_is_split(mesh, dim, spec):
    x = torch.randn(4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)) * 3
    got = iso.shard(x.to("jax"), mesh, spec).logcumsumexp(dim)
    torch.testing.assert_close(got.cpu(), x.logcumsumexp(dim), rtol=1e-4, atol=1e-5)


def test_complex_logcumsumexp_of_what_is_not_finite():
    low = complex("-inf+1j")
    x = torch.tensor([low, low, 1j, 2 + 3j, complex("nan+0j"), 1])
    check(aten.logcumsumexp.default, x, 0)
    check(aten.logcumsumexp.default, x[:0], 0)


def test_a_hash_of_what_lies_on_several_devices():
    x = torch.randn(8, 3)
    split = iso.shard(x, iso.make_mesh((8,), ("x",)), P("x"))
    for dim in ((), 0, 1):
        assert torch.equal(torch.hash_tensor(split, dim).cpu(), torch.hash_tensor(x, dim))
