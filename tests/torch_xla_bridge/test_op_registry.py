"""`xla_op_registry`, `xla_builder`, `call_jax`: operations built value by value, against torch."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.torch_xla import _XLAC
from isoshard.torch_xla_bridge.torch_xla.core import xla_builder as xb
from isoshard.torch_xla_bridge.torch_xla.core import xla_op_registry as xor

Op = xb.Op


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(opfn, torch_fn, *tensors, **kwargs):
    operation = xor.register("operation", opfn)
    got = operation(*(tensor.to("jax") for tensor in tensors), **kwargs)
    want = torch_fn(*tensors)
    single = isinstance(want, torch.Tensor)
    for one, other in zip([got] if single else got, [want] if single else want, strict=True):
        torch.testing.assert_close(one.cpu(), other)


BINARY = {
    "add": (lambda a, b: a + b, torch.add),
    "sub": (lambda a, b: a - b, torch.sub),
    "mul": (lambda a, b: a * b, torch.mul),
    "div": (lambda a, b: a / b, torch.div),
    "matmul": (lambda a, b: a @ b, torch.matmul),
    "pow": (lambda a, b: (a * a) ** b, lambda a, b: (a * a) ** b),
    "rem": (lambda a, b: a % b, torch.fmod),
    "max": (lambda a, b: a.max(b), torch.maximum),
    "min": (lambda a, b: a.min(b), torch.minimum),
    "atan2": (lambda a, b: a.atan2(b), torch.atan2),
    "le": (lambda a, b: a <= b, torch.le),
    "lt": (lambda a, b: a < b, torch.lt),
    "ge": (lambda a, b: a >= b, torch.ge),
    "gt": (lambda a, b: a > b, torch.gt),
    "eq": (lambda a, b: a == b, torch.eq),
    "ne": (lambda a, b: a != b, torch.ne),
    "select": (lambda a, b: (a > b).select(a, b), torch.maximum),
    "clamp": (lambda a, b: a.clamp(b.zeros_like(), b.ones_like()), lambda a, b: a.clamp(0, 1)),
    "concat": (lambda a, b: Op.concat_in_dim((a, b), 1), lambda a, b: torch.cat((a, b), 1)),
}


UNARY = "acos asin atan ceil cos cosh erf erfc exp expm1 floor log1p sin sinh tan tanh".split()
POSITIVE = ["log", "sqrt", "rsqrt"]


def test_of_one_and_of_two_values():
    """Each kind as one operation of several results."""
    check(
        lambda a, b: tuple(ours(a, b) for ours, _ in BINARY.values()),
        lambda a, b: tuple(theirs(a, b) for _, theirs in BINARY.values()),
        data(4, 4),
        data(4, 4, seed=1),
    )
    for names, values in ((UNARY, data(3, 4).tanh()), (POSITIVE, data(3, 4).abs())):
        check(
            lambda a, names=names: tuple(getattr(a, name)() for name in names),
            lambda a, names=names: tuple(getattr(torch, name)(a) for name in names),
            values,
        )


def test_more_of_one_value():
    x = data(4, 6)
    pad = [(1, 2, 0), (0, 1, 0)]
    each = (
        (lambda a: -a, torch.neg),
        (lambda a: a.tanh().erfinf(), lambda a: a.tanh().erfinv()),
        (lambda a: a.reshape((6, 4)), lambda a: a.reshape(6, 4)),
        (lambda a: a.broadcast((2,)), lambda a: a.expand(2, 4, 6)),
        (lambda a: a.broadcast_in_dim((4, 2, 6), (0, 2)), lambda a: a[:, None].expand(4, 2, 6)),
        (lambda a: a.slice((1, 0), (3, 5), (1, 2)), lambda a: a[1:3, 0:5:2]),
        (lambda a: a.transpose((1, 0)), lambda a: a.t()),
        (lambda a: a.rev((1,)), lambda a: a.flip(1)),
        (lambda a: a.cast(xb.Type.F64), lambda a: a.double()),
        (lambda a: a.bitcast(xb.Type.S32), lambda a: a.view(torch.int32)),
        (lambda a: a.get_dimension_size(1), lambda a: torch.tensor(6, dtype=torch.int32)),
        (
            lambda a: a.pad(Op.scalar(a.builder(), 7.0), pad),
            lambda a: F.pad(a, (0, 1, 1, 2), value=7),
        ),
    )
    check(lambda a: tuple(f(a) for f, _ in each), lambda a: tuple(f(a) for _, f in each), x)
    check(
        lambda a: ((a << a.ones_like()) >> a.ones_like(), ~a, a / a.scalar_like(2)),
        lambda a: (a, ~a, torch.tensor([2**39, -1])),
        torch.tensor([2**40, -3]),
    )
    check(lambda a: a.real() + a.imag(), lambda a: a.real + a.imag, torch.tensor([1 + 2j]))


def test_dynamic_slices():
    x, update = data(5, 4), data(2, 2, seed=1)
    starts = torch.tensor([1, 2])

    def cut(a, where):
        first, second = (where.slice((n,), (n + 1,)).reshape(()) for n in (0, 1))
        return a.dynamic_slice((first, second), (2, 2))

    check(cut, lambda a, where: a[1:3, 2:4], x, starts)

    def put(a, b, where):
        first, second = (where.slice((n,), (n + 1,)).reshape(()) for n in (0, 1))
        return a.dynamic_update_slice(b, (first, second))

    def torch_put(a, b, where):
        a = a.clone()
        a[1:3, 2:4] = b
        return a

    check(put, torch_put, x, update, starts)


def test_reductions():
    x = data(4, 6)

    def total(a):
        return a.reduce(Op.zero(a.builder()), lambda p, q: p + q, (1,))

    check(total, lambda a: a.sum(1), x)
    check(lambda a: a.reduce_all(Op.one(a.builder()), lambda p, q: p * q), torch.prod, x)

    def pooled(a):
        least = Op.scalar(a.builder(), float("-inf"))
        return a.reduce_window(least, lambda p, q: p.max(q), (1, 2), (1, 2))

    check(pooled, lambda a: F.max_pool1d(a, 2), x)
    image = data(1, 2, 6, 6)
    check(
        lambda a: a.max_pool((1, 1, 2, 2), (1, 1, 2, 2), 0, 1, (2, 3)),
        lambda a: F.max_pool2d(a, 2),
        image,
    )
    check(
        lambda a: Op.map(
            (a,), Op.make_computation("f", lambda p: p * p, [a.shape().as_scalar()]), (0, 1)
        ),
        torch.square,
        x,
    )


def test_convolutions():
    x, kernel = data(2, 4, 7, 7), data(6, 2, 3, 3, seed=1)
    check(
        lambda a, k: a.conv_with_general_padding(k, (2, 2), ((1, 1), (1, 1)), 2),
        lambda a, k: F.conv2d(a, k, stride=2, padding=1, groups=2),
        x,
        kernel,
    )
    axes = {
        "input_batch_dimension": 0,
        "input_feature_dimension": 3,
        "kernel_input_feature_dimension": 2,
        "kernel_output_feature_dimension": 3,
        "output_batch_dimension": 0,
        "output_feature_dimension": 3,
        "input_spatial_dimensions": (1, 2),
        "kernel_spatial_dimensions": (0, 1),
        "output_spatial_dimensions": (1, 2),
    }
    check(
        lambda a, k: a.conv_general_dilated(k, (1, 1), ((0, 0), (0, 0)), (1, 1), (2, 2), **axes),
        lambda a, k: F.conv2d(a.permute(0, 3, 1, 2), k.permute(3, 2, 0, 1), dilation=2).permute(
            0, 2, 3, 1
        ),
        data(2, 7, 7, 3),
        data(3, 3, 3, 5, seed=1),
    )


def test_branches_and_loops():
    x, y = data(3), data(3, seed=1)

    def branch(a, b):
        big = a.reduce_all(Op.zero(a.builder()), lambda p, q: p + q) > Op.zero(a.builder())
        return big.mkconditional((a, b), lambda p, q: p + q, lambda p, q: p - q)

    for sign in (1, -1):
        want = x.abs() * sign + (y if sign == 1 else -y)
        check(branch, lambda a, b, want=want: want, x.abs() * sign, y)

    def loop(a):
        count = Op.scalar(a.builder(), 0, dtype=xb.Type.S64)

        def more(n, value):
            return n < n.scalar_like(5)

        def step(n, value):
            return n + n.ones_like(), value * value.scalar_like(2)

        return Op.mkwhile((count, a), more, step).get_tuple_element(1)

    check(loop, lambda a: a * 32, x)


def test_sort_with_a_comparator():
    x = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, -1.0, 5.0, 2.0]])
    places = torch.arange(4).expand(2, 4).contiguous()

    def by_first(a, b):
        shapes = [one.shape().as_scalar() for one in (a, a, b, b)]
        less = Op.make_computation("less", lambda p, q, i, j: p < q, shapes)
        return Op.sort((a, b), less, dimension=1).get_tuple_element(1)

    check(by_first, lambda a, b: a.argsort(dim=1, stable=True), x, places)


def test_triangular_solve():
    a = data(3, 3).tril() + 3 * torch.eye(3)
    check(
        lambda m, b: m.triangualr_solve(b, left_side=True, lower=True),
        lambda m, b: torch.linalg.solve_triangular(m, b, upper=False),
        a,
        data(3, 2, seed=1),
    )


def test_keyword_arguments_choose_a_computation():
    operation = xor.register("cut", lambda a, dimno=0: a.slice_in_dim(0, 1, dimno))
    x = data(2, 3)
    for dim in (0, 1, 0):
        assert torch.equal(operation(x.to("jax"), dimno=dim).cpu(), x.narrow(dim, 0, 1))


def test_gradients_and_marks_go_through():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    for square in (
        xor.register("square", lambda a: a * a),
        lambda x: xb.call_jax(lambda a: a * a, (x,)),
    ):
        x = xs.mark_sharding(data(8).to("jax"), mesh, ("x",)).requires_grad_()
        square(x).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), 2 * data(8))


def test_computations_by_hand():
    builder = xb.create_builder("sum")
    shape = xb.tensor_shape(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (shape.dtype, shape.sizes, shape.rank) == ("bf16", (2, 3), 2)
    a, b = (xb.mkparam(builder, n, xb.mkshape(xb.Type.F32, (2,))) for n in (0, 1))
    computation = (a + b).build("sum")
    assert "add" in xb.get_computation_hlo(computation)
    x = torch.ones(2, device="jax")
    (got,) = _XLAC._xla_user_computation("xla::sum", (x, x * 2), computation)
    assert got.tolist() == [3.0, 3.0]
    assert (xb.mkop("Add", (a.op, b.op)).shape().sizes, a.shape().is_tuple()) == ((2,), False)
    pair = Op.tuple((a, b)).shape()
    assert pair.is_tuple() and pair.tuple_size() == 2 and pair.tuple_shape(0)["type"] == "f32"
    counted = xb.mkleaf("Iota", builder, shape=xb.mkshape("s64", (3,)).shape, iota_dimension=0)
    assert counted.build("iota")().tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="sum takes 2 arrays, not 1"):
        computation(torch.ones(2))


def test_what_the_builder_does_not_have():
    a = xb.mkparam(xb.create_builder("f"), 0, xb.mkshape("f32", (2,)))
    with pytest.raises(ValueError, match="'Scatter' is none of the builder's operations"):
        xb.mkop("Scatter", (a.op,))
    with pytest.raises(ValueError, match="sizes are static in JAX's programs"):
        xb.mkshape("f32", (2,), dynamic_dimensions=(True,))


# --- call_jax ------------------------------------------------------------------------------------


def add_sin(a, b, *, scale=1.0):
    return a + scale * jnp.sin(b)


def test_values_keywords_and_gradients():
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    x, y = a.to("jax"), b.to("jax").requires_grad_()
    got = xb.call_jax(add_sin, (x, y), {"scale": 2.0}, name="adding")
    torch.testing.assert_close(got.detach().cpu(), a + 2 * torch.sin(b))
    got.sum().backward()
    torch.testing.assert_close(y.grad.cpu(), 2 * torch.cos(b))


def test_a_function_written_again_is_the_same_one(counted):
    x, traced = torch.ones(4, device="jax"), []
    xs.sync()
    before = counted("compilations")
    for _ in range(3):

        def local(a, factor=3):
            return a * factor

        y = xb.call_jax(local, (x,))
        y = xb.call_jax(lambda a: a + 1, (y,))
        y = xb.call_jax(functools.partial(add_sin, scale=0.5), (y, y))
        assert y.sum().item() == pytest.approx(4 * (4 + 0.5 * np.sin(4)))
    assert counted("compilations") == before + 1
    for _ in range(3):

        def noting(a):
            traced.append(1)
            return a

        xb.call_jax(noting, (x,))
    assert len(traced) == 3  # it holds a list, which cannot be compared
    for _ in range(3):

        def named(a):
            traced.append(2)
            return a

        xb.call_jax(named, (x,), override_hash="named")
    assert traced.count(2) == 1


def test_mistakes():
    with pytest.raises(TypeError, match=r"positional arguments as one tuple, not XLAShardedTensor"):
        xb.call_jax(jnp.sin, torch.ones(2, device="jax"))

    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x * 2

    with pytest.raises(TypeError, match="override_hash"):
        xb.call_jax(Unhashable(), (torch.ones(2, device="jax"),))
    got = xb.call_jax(Unhashable(), (torch.ones(2, device="jax"),), override_hash="twice")
    assert got.tolist() == [2, 2]
