"""What torch's own tests of a device say of single calls: errors, sharing, dtypes of `out=`."""

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401

F = torch.nn.functional


def ones(*size, **options):
    return torch.ones(*size, device="jax", **options)


def count(n, **options):
    return torch.arange(n, device="jax", **options)


def long(*numbers):
    return torch.tensor(numbers, device="jax")


def rows(name, index, source=None, dim=0, target=None):
    target = ones(3, 3) if target is None else target
    args = (dim, index) if source is None else (dim, index, source)
    return lambda: getattr(target, name)(*args)


SHARING = "refer to a single memory location"
REFUSED = {
    "select: a matrix of places": (rows("index_select", long(0, 1)[None]), IndexError, "vector"),
    "select: floats": (rows("index_select", ones(1)), RuntimeError, "int32"),
    "select: no axis": (rows("index_select", long(0), dim=2), IndexError, "out of range"),
    "select: of a number": (
        rows("index_select", long(0, 0), target=ones(())),
        RuntimeError,
        "only 1 value",
    ),
    "add: floats": (rows("index_add", ones(1), ones(1, 3)), RuntimeError, "int32"),
    "add: a matrix": (rows("index_add", long(0)[None], ones(1, 3)), IndexError, "vector"),
    "add: too many": (rows("index_add", long(0, 1), ones(1, 3)), RuntimeError, "Number of"),
    "copy: floats": (rows("index_copy", ones(1), ones(1, 3)), RuntimeError, "int64"),
    "copy: 32 bits": (rows("index_copy", long(0).int(), ones(1, 3)), RuntimeError, "int64"),
    "copy: too many": (rows("index_copy", long(0, 1), ones(1, 3)), IndexError, "Number of"),
    "fill: floats": (lambda: ones(3).index_fill(0, ones(1), 1), IndexError, "int64"),
    "fill: a matrix": (lambda: ones(3).index_fill(0, long(0)[None], 1), RuntimeError, "vector"),
    "put: floats": (lambda: ones(3).put_(ones(1), ones(1)), RuntimeError, "long tensor"),
    "put: too few": (lambda: ones(3).put_(long(0, 1), ones(1)), IndexError, "same number"),
    "put: nowhere": (lambda: ones(0).put_(long(0), ones(1)), IndexError, "empty tensor"),
    "fill behind bytes": (
        lambda: ones(3).masked_fill_(ones(3).byte(), 2),
        RuntimeError,
        "only supports boolean masks",
    ),
    "index_put: dtypes": (
        lambda: ones(3).index_put_((long(0),), ones(1).double()),
        RuntimeError,
        "source and destination dtypes match",
    ),
    "random: too high": (
        lambda: ones(3).byte().random_(0, 300),
        RuntimeError,
        "to - 1 is out of bounds",
    ),
    "random: too low": (
        lambda: torch.randint(-5, 5, (3,), dtype=torch.uint8, device="jax"),
        RuntimeError,
        "from is out of bounds",
    ),
    "random: nothing": (lambda: long(1).random_(5, 5), RuntimeError, "random_ expects 'from'"),
    "randperm: of bytes": (
        lambda: torch.randperm(300, dtype=torch.uint8, device="jax"),
        RuntimeError,
        "without overflow",
    ),
    "randperm: of halves": (
        lambda: torch.randperm(3000, dtype=torch.float16, device="jax"),
        RuntimeError,
        "cannot be greater than 2049",
    ),
    "rand_like: integers": (lambda: torch.rand_like(long(1)), NotImplementedError, "Long"),
    "bernoulli: integers": (lambda: torch.bernoulli(long(1)), NotImplementedError, "Long"),
    "bernoulli: sizes": (lambda: ones(3).bernoulli_(ones(2)), RuntimeError, "must match"),
    "multinomial: integers": (
        lambda: torch.multinomial(long(1, 2), 1),
        RuntimeError,
        "only supports floating-point",
    ),
    "multinomial: none": (lambda: torch.multinomial(ones(2), 0), RuntimeError, "n_sample <= 0"),
    "multinomial: a cube": (lambda: torch.multinomial(ones(1, 2, 3), 1), RuntimeError, "1 or 2"),
    "order of complex": (lambda: ones(1) < ones(1).cfloat(), NotImplementedError, "lt"),
    "bits of floats": (lambda: ones(1) & 1, NotImplementedError, "bitwise_and"),
    "gcd of floats": (lambda: torch.gcd(ones(1), ones(1)), NotImplementedError, "gcd"),
    "logaddexp of integers": (
        lambda: torch.logaddexp(long(1), long(1)),
        NotImplementedError,
        "Long",
    ),
    "resized integers": (
        lambda: F.interpolate(count(4).view(1, 1, 4), scale_factor=2, mode="linear"),
        NotImplementedError,
        "Long",
    ),
    "linspace of bools": (
        lambda: torch.linspace(0, 1, 3, dtype=torch.bool, device="jax"),
        NotImplementedError,
        "Bool",
    ),
    "arange: no number": (lambda: torch.arange(float("nan"), device="jax"), RuntimeError, "range"),
    "arange: no end": (
        lambda: torch.arange(-5, -1e20, -1, device="jax"),
        RuntimeError,
        "possible overflow",
    ),
    "alpha: a float": (
        lambda: torch.add(long(1), long(1), alpha=1.5),
        RuntimeError,
        "alpha must not be a floating point",
    ),
    "alpha: of bools": (
        lambda: torch.add(long(1).bool(), long(1).bool(), alpha=1.5),
        RuntimeError,
        "alpha must not be a floating point",
    ),
    "alpha: a bool": (lambda: torch.add(ones(1), 1, alpha=True), RuntimeError, "Boolean alpha"),
    "in place: kinds": (
        lambda: long(1).add_(1.5),
        RuntimeError,
        "result type Float can't be cast to the desired output type Long",
    ),
    "where: integers": (
        lambda: torch.where(long(1), 1, 2),
        RuntimeError,
        "where expected condition to be a boolean tensor",
    ),
    "complex: two dtypes": (
        lambda: torch.complex(ones(1), ones(1).double()),
        RuntimeError,
        "Expected object of scalar type Float but got scalar type Double for second argument",
    ),
    "complex: integers": (
        lambda: torch.polar(long(1), long(1)),
        RuntimeError,
        "Half, Float or Double tensors but got Long and Long",
    ),
    "complex: out=": (
        lambda: torch.complex(ones(1), ones(1), out=ones(1)),
        RuntimeError,
        "type ComplexFloat but got scalar type Float for argument 'out'",
    ),
    "neg: out=": (lambda: torch.neg(long(1), out=ones(1)), RuntimeError, "Found dtype"),
    "logcumsumexp: out=": (
        lambda: torch.logcumsumexp(ones(1), 0, out=ones(1).double()),
        RuntimeError,
        "expected scalar_type Float but found Double",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_call(case):
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()


def shifted(write):
    x = count(4)
    return write(x[1:], x[:-1])


def itself(write):
    x = count(2)
    return write(x)


OVERLAPPING = {
    "copy_": lambda: shifted(lambda one, other: one.copy_(other)),
    "add_": lambda: shifted(lambda one, other: one.add_(other)),
    "addcmul_": lambda: shifted(lambda one, other: one.addcmul_(other, other)),
    "a slice": lambda: shifted(lambda one, other: one.__setitem__(slice(None), other)),
    "add(out=)": lambda: shifted(lambda one, other: torch.add(one, 1, out=other)),
    "cumsum(out=)": lambda: shifted(lambda one, other: torch.cumsum(one, 0, out=other)),
    "mul_ of a part": lambda: itself(lambda x: x.mul_(x[:1])),
    "take(out=)": lambda: itself(lambda x: torch.take(x, long(0, 1), out=x)),
    "cat(out=)": lambda: itself(lambda x: torch.cat([x, x], out=x)),
    "gather(out=)": lambda: itself(lambda x: torch.gather(x, 0, long(0, 1), out=x)),
    "index_select(out=)": lambda: itself(lambda x: torch.index_select(x, 0, long(0, 1), out=x)),
    "index_copy_": lambda: itself(lambda x: x.index_copy_(0, long(1, 0), x)),
    "index_add_": lambda: itself(lambda x: x.index_add_(0, x, long(1, 0))),
    "index_fill_": lambda: itself(lambda x: x.index_fill_(0, x, 1)),
    "index_put_": lambda: itself(lambda x: x.index_put_((x,), long(1, 0))),
    "put_": lambda: itself(lambda x: x.put_(x, long(1, 0))),
    "scatter_": lambda: itself(lambda x: x.scatter_(0, x, long(1, 0))),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_a_write_to_what_is_read_is_refused(case):
    with pytest.raises(RuntimeError, match=f"unsupported operation.*{SHARING}"):
        OVERLAPPING[case]()


def test_a_write_to_all_of_what_is_read_is_none():
    x = count(4)
    assert x.add_(x).tolist() == [0, 2, 4, 6]
    assert torch.add(x, 1, out=x).tolist() == [1, 3, 5, 7]
    assert x[1:3].copy_(x[1:3]).tolist() == [3, 5]
    assert x[:2].copy_(x[2:]).tolist() == [5, 7]
    assert x.masked_scatter_(x > 0, x).tolist() == [5, 7, 5, 7]


def test_is_set_to_asks_for_the_same_elements():
    x = count(4)
    same = [x.is_set_to(other) for other in (x, x.view(4), x[:2], x.clone())]
    assert same == [True, True, False, False]
    y = count(0).set_(x)
    assert y.is_set_to(x) and y.add_(1) is y and x.tolist() == [1, 2, 3, 4]
    assert y.set_().shape == (0,) and x.shape == (4,)
    with pytest.raises(RuntimeError, match="Could not set"):
        y.set_(ones(2))


def test_sums_run_in_the_dtype_of_out():
    x = torch.tensor([1.0, 2.5], device="jax")
    out = torch.empty(2, dtype=torch.int32, device="jax")
    assert torch.cumsum(x, 0, out=out).tolist() == [1, 3]
    assert torch.prod(x, 0, out=torch.empty((), dtype=torch.int32, device="jax")).item() == 2


def test_linspace_between_complex_numbers():
    got = torch.linspace(0, 1 + 2j, 3, device="jax")
    torch.testing.assert_close(got.cpu(), torch.linspace(0, 1 + 2j, 3))


def test_the_module_of_the_device_says_what_it_is():
    assert torch.jax.is_bf16_supported() is True
    assert isinstance(torch.jax.get_device_name(), str)
