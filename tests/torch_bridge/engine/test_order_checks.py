"""Sorting, reducing, shifting, and dividing refuse at the call what CPU torch refuses."""

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401


def rows(dtype, device):
    return torch.tensor([[3, 1, 2, 2], [0, 5, 5, 1]]).to(dtype).to(device)


BOOL, INT, FLOAT, COMPLEX = torch.bool, torch.int32, torch.float32, torch.complex64
REFUSED = {
    "topk: too many": (FLOAT, lambda x: x.topk(9), "selected index k out of range"),
    "topk: negative": (FLOAT, lambda x: x.topk(-1), "selected index k out of range"),
    "topk: axis before bools": (BOOL, lambda x: x.topk(1, dim=4), "Dimension out of range"),
    "topk: bools": (BOOL, lambda x: x.topk(2), "does not support bool dtypes"),
    "topk: complex": (COMPLEX, lambda x: x.topk(2), "does not support complex dtypes"),
    "kthvalue: too many": (COMPLEX, lambda x: x.kthvalue(9), "out of range for dimension 1"),
    "kthvalue: bools": (BOOL, lambda x: x.kthvalue(2), "'Bool'"),
    "sort: complex": (COMPLEX, lambda x: x.sort(), "does not support complex dtypes"),
    "median: bools": (BOOL, lambda x: x.median(), "'Bool'"),
    "median: axis before bools": (BOOL, lambda x: x.median(3), "Dimension out of range"),
    "nanmedian: bools": (BOOL, lambda x: x.nanmedian(1), "'Bool'"),
    "nanmedian: nothing": (FLOAT, lambda x: x[:, :0].nanmedian(1), r"^median\(\): Expected"),
    "searchsorted: bools": (BOOL, lambda x: torch.searchsorted(x, x), "'Bool'"),
    "bucketize: bools": (BOOL, lambda x: torch.bucketize(x, x[0]), "'Bool'"),
    "max: complex": (COMPLEX, lambda x: x.max(), "not implemented for 'ComplexFloat'"),
    "max along: complex": (COMPLEX, lambda x: x.max(1), "does not support complex input"),
    "max: of no complex": (COMPLEX, lambda x: x[:, :0].max(1), "non-zero size"),
    "amax: of no complex": (COMPLEX, lambda x: x[:, :0].amax(1), "non-zero size"),
    "aminmax: complex": (COMPLEX, lambda x: x[0, 0].aminmax(), "ComplexFloat"),
    "aminmax: of one": (COMPLEX, lambda x: x[0, 0].aminmax(dim=0), "aminmax not implemented"),
    "var: integers": (INT, lambda x: x.var(), "^std and var only support floating"),
    "std_mean: integers": (INT, lambda x: torch.std_mean(x), "^std_mean only support floating"),
    "mean: integers": (INT, lambda x: x.mean(3), r"mean\(\): could not infer output dtype"),
    "mean: asked for": (FLOAT, lambda x: x.mean(dtype=INT), "Optional dtype must be"),
    "sum: an axis twice": (FLOAT, lambda x: x.sum((0, 0)), "dim 0 appears multiple times"),
    "all: an axis twice": (BOOL, lambda x: x.all((1, -1)), "dim 1 appears multiple times"),
    "logsumexp: no axis": (FLOAT, lambda x: x.logsumexp(()), "doesn't match the broadcast"),
    "cummax: a number": (FLOAT, lambda x: x[0, 0].cummax(1), "Expected reduction dim -1 or 0"),
    "shift: floats": (FLOAT, lambda x: x << 1, "not implemented for 'Float'"),
    "shift: by a float": (INT, lambda x: x >> 1.0, "not implemented for 'Float'"),
    "shift: in place": (FLOAT, lambda x: x.__ilshift__(1), "not implemented for 'Float'"),
    "shift: bools": (BOOL, lambda x: torch.bitwise_left_shift(x, True), "'Bool'"),
    "divide: by zero": (INT, lambda x: x // 0, "ZeroDivisionError"),
    "divide: wraps to zero": (INT, lambda x: x // 2**32, "ZeroDivisionError"),
    "divide: rounds": (INT, lambda x: x.div_(2**40, rounding_mode="trunc"), "ZeroDivisionError"),
    "remainder: wraps to zero": (torch.uint8, lambda x: x % 256, "ZeroDivisionError"),
    "remainder: bools": (BOOL, lambda x: x % True, "not implemented for 'Bool'"),
    "erf: complex": (COMPLEX, lambda x: x.erf(), "not implemented for 'ComplexFloat'"),
    "logit: complex": (COMPLEX, lambda x: x.logit(), "not implemented for 'ComplexFloat'"),
    "round: bools": (BOOL, lambda x: x.round(), "not implemented for 'Bool'"),
    "frac: integers": (INT, lambda x: x.frac_(), "not implemented for 'Int'"),
    "round: into doubles": (FLOAT, lambda x: torch.round(x, out=x.double()), "Found dtype"),
    "maximum: complex": (COMPLEX, lambda x: torch.maximum(x, x), "^maximum not implemented for"),
    "fmod: complex": (COMPLEX, lambda x: x.fmod(x), "not implemented for 'ComplexFloat'"),
    "atan2: complex": (COMPLEX, lambda x: x.atan2(x), "not implemented for 'ComplexFloat'"),
    "xlogy: complex": (COMPLEX, lambda x: torch.xlogy(x, 2), "not implemented for 'ComplexFloat'"),
    "hypot: integers": (INT, lambda x: x.hypot(x), "not implemented for 'Int'"),
    "clamp: bools": (BOOL, lambda x: x.clamp(min=True), "not implemented for 'Bool'"),
    "as_strided: few strides": (FLOAT, lambda x: x.as_strided((2, 2), (1,)), "mismatch in length"),
    "as_strided_copy": (FLOAT, lambda x: torch.as_strided_copy(x, (2,), (1, 2)), "mismatch in"),
    "as_strided_scatter": (
        FLOAT,
        lambda x: torch.as_strided_scatter(x, x[:, :2], (2, 2), (1,)),
        "mismatch in length",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_on_the_cpu(case):
    dtype, call, words = REFUSED[case]
    with pytest.raises(Exception, match=words) as wanted:
        call(rows(dtype, "cpu"))
    with pytest.raises(type(wanted.value), match=words) as got:
        call(rows(dtype, "jax"))
    assert type(got.value) is type(wanted.value)


TAKEN = {
    "buckets of bools and numbers": (BOOL, lambda x: torch.searchsorted(x[0].sort()[0], 2)),
    "nan_to_num_ of complex": (
        FLOAT,
        lambda x: torch.complex(x / 0, x).nan_to_num_(1),
    ),
    "floor of integers": (INT, lambda x: x.floor_()),
    "bools by bools": (BOOL, lambda x: torch.clamp_min(x, x[:1])),
    "bools by numbers": (BOOL, lambda x: x.clamp(max=0)),
    "nothing by zero": (INT, lambda x: x[:0] // 0),
    "true division by zero": (INT, lambda x: x / 0),
    "floats by zero": (FLOAT, lambda x: x // 0),
    "wraps to one": (INT, lambda x: x // (2**32 + 1)),
    "shift by bools": (INT, lambda x: x << (x > 1)),
    "bools full of a large number": (BOOL, lambda x: torch.full_like(x, 2**40)),
    "median of no complex": (COMPLEX, lambda x: x[:0].median()),
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken_as_on_the_cpu(case):
    dtype, call = TAKEN[case]
    want, got = call(rows(dtype, "cpu")), call(rows(dtype, "jax"))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


COMPUTED = {
    "maxima of bools at places": lambda device: (
        torch.ones(3, 2, device=device)
        .bool()
        .index_reduce(
            0,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.ones(1, 2, device=device).bool(),
            "amax",
        )
    ),
    "products of complex numbers at places": lambda device: torch.ones(
        3, 2, dtype=torch.complex64, device=device
    ).index_reduce(
        0,
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((1, 2), 2j, device=device),
        "prod",
    ),
    "no bools in buckets": lambda device: torch.searchsorted(
        torch.ones(3, dtype=torch.bool, device=device),
        torch.ones(0, dtype=torch.bool, device=device),
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("call", COMPUTED.values(), ids=COMPUTED)
def test_what_looks_refused_and_is_computed(call):
    torch.testing.assert_close(call("jax").cpu(), call("cpu"))


def test_no_kth_value_of_nothing():
    for device in ("cpu", "jax"):
        with pytest.raises(IndexError, match="non-zero size"):
            torch.zeros(0, device=device).kthvalue(1, 0)


@pytest.mark.parametrize("dims", [(-1, 0, 2), (2, -1, 0), (-1, 0)])
@pytest.mark.parametrize(
    "name", ["all", "any", "sum", "mean", "amax", "logsumexp", "std", "nansum"]
)
def test_an_axis_twice_and_one_that_is_not_there(name, dims):
    def kind(device):
        try:
            getattr(torch.ones(3, device=device), name)(dim=dims)
        except Exception as error:
            return type(error)

    assert kind("jax") is kind("cpu") is not None
