import pytest
import torch
import torch.nn.functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives
from tests.torch_bridge.lowerings.harness import check
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    COMPLEX,
    CUBE,
    FLOATS,
    HALVES,
    INF,
    INTS,
    NAN,
    ROW,
    SCALAR,
)

aten = torch.ops.aten
INDEX = torch.tensor([[0, 1, 2], [2, 2, 0]])
SOURCE = torch.tensor([[1.5, -2.0, 3.0, 9.0], [4.0, 0.5, -6.0, 9.0]])
PLACES = torch.tensor([2, 0, 2])
ONE_EACH = torch.tensor([2, 0])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("op", [aten.index_put.default, aten._unsafe_index_put.default])
@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        ([torch.tensor([1, 0])], (2, 3, 4)),
        ([None, torch.tensor([-1, 0])], (2, 4)),
        ([None, torch.tensor([[0], [2]]), torch.tensor([3, 1])], ()),
        ([torch.tensor([0, 1]), None, torch.tensor([3, -3])], (2, 3)),
    ],
)
def test_index_put(op, indices, shape, accumulate):
    values = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
    check(op, CUBE, indices, values, accumulate)


def test_repeated_places_accumulate():
    check(aten.index_put.default, ROW, [torch.tensor([0, 0, 3])], torch.ones(3), True)
    check(aten.index_put.default, INTS, [PLACES], torch.ones(4, dtype=torch.int64), True)
    check(aten.index_put.default, BOOLS, [ONE_EACH], BOOLS[:2], True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([BOOLS], SCALAR),
        ([BOOLS], SCALAR[None]),
        ([BOOLS], torch.arange(8.0)),
        ([BOOLS[:, 0]], ROW),
        ([BOOLS[:, 0]], SOURCE),
        ([None, BOOLS[1]], FLOATS[:, :1]),
        ([torch.zeros(3, 4, dtype=torch.bool)], torch.empty(0)),
    ],
)
def test_index_put_at_a_mask(indices, values, accumulate):
    check(aten.index_put.default, FLOATS, indices, values, accumulate)


def test_masked_index_put():
    mask = torch.tensor([True, False, True])
    check(
        aten._unsafe_masked_index_put_accumulate.default,
        ROW,
        mask,
        [torch.tensor([1, 2, 1])],
        torch.ones(3),
    )


@pytest.mark.parametrize("dim", [0, -1])
def test_scatter(dim):
    index = torch.tensor([[3, 0], [1, 2]] if dim else [[0, 1, 2, 0], [2, 0, 1, 1]])
    check(aten.scatter.src, FLOATS, dim, index, SOURCE)
    check(aten.scatter.value, FLOATS, dim, index, -INF)
    check(aten.scatter.value, INTS, dim, index, 7)
    check(aten.scatter_add.default, FLOATS, dim, index, SOURCE)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize(
    ("values", "source"),
    [(FLOATS, SOURCE), (INTS, SOURCE.long()), (HALVES, SOURCE.bfloat16()), (BOOLS, SOURCE > 2)],
    ids=["floats", "ints", "halves", "bools"],
)
def test_scatter_reduce(values, source, reduce, include_self):
    if values is BOOLS and reduce == "mean":
        reduce = "sum"
    op = aten.scatter_reduce.two
    check(op, values, 0, INDEX, source, reduce, include_self=include_self, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:.*The reduce argument of torch.scatter")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_old_scatter_reductions(reduce):
    check(aten.scatter.reduce, FLOATS, 0, INDEX, SOURCE, reduce=reduce)
    check(aten.scatter.value_reduce, FLOATS, 1, INDEX, 2.0, reduce=reduce)


def test_scatter_reduce_keeps_nan():
    source = torch.tensor([1.0, NAN, 5.0])
    check(aten.scatter_reduce.two, ROW, 0, torch.tensor([0, 0, 1]), source, "amax")


def test_scatter_of_0d_and_nothing():
    nothing = torch.empty(0, dtype=torch.int64)
    check(aten.scatter.src, SCALAR, 0, torch.tensor(0), torch.tensor(4.0))
    check(aten.scatter.value, ROW, 0, nothing, 4.0)
    check(aten.scatter_add.default, ROW, 0, nothing, torch.empty(0))


@pytest.mark.parametrize("dim", [0, -2])
def test_index_writes(dim):
    check(aten.index_add.default, FLOATS, dim, PLACES, FLOATS * 2)
    check(aten.index_add.default, FLOATS, dim, PLACES, FLOATS * 2, alpha=-0.5)
    check(aten.index_add.default, INTS, dim, PLACES, INTS, alpha=2)
    check(aten.index_add.default, COMPLEX, dim, PLACES, COMPLEX)
    check(aten.index_copy.default, FLOATS, dim, ONE_EACH, SOURCE)
    check(aten.index_fill.int_Scalar, FLOATS, dim, ONE_EACH, NAN)
    check(aten.index_fill.int_Tensor, INTS, dim, ONE_EACH, torch.tensor(9))


def test_index_writes_along_the_last_axis():
    check(aten.index_add.default, FLOATS, 1, torch.tensor([3, 3]), FLOATS[:, :2])
    check(aten.index_copy.default, CUBE, 2, torch.tensor([1]), CUBE[:, :, :1])
    check(aten.index_fill.int_Scalar, CUBE, -1, torch.tensor([0, -1]), 1)


def test_index_writes_of_0d():
    zero = torch.tensor([0])
    check(aten.index_add.default, SCALAR, 0, zero, torch.tensor(3.0))
    check(aten.index_copy.default, SCALAR, 0, zero, SCALAR)
    check(aten.index_fill.int_Scalar, SCALAR, 0, zero, 1.0)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_index_reduce(reduce, include_self):
    op = aten.index_reduce.default
    check(op, FLOATS, 0, PLACES, FLOATS.flip(0), reduce, include_self=include_self)
    check(op, INTS, 0, PLACES, INTS.flip(0), reduce, include_self=include_self)


@pytest.mark.parametrize("accumulate", [False, True])
def test_put(accumulate):
    places = torch.tensor([[0, -1], [5, 5]] if accumulate else [0, -1, 5, 4])
    source = torch.arange(1.0, 5.0)
    check(aten.put.default, FLOATS, places, source.reshape(places.shape), accumulate)


def _index_copy(x, row, images):
    index = torch.arange(16).reshape(4, 4).to(x.device) * 3 % 4
    x = torch.tanh(x).scatter_add_(0, index, x.clone())
    return x.index_copy_(0, PLACES[:1].to(x.device), row)


def _scatter_add_then_view(x, row, images):
    x = x.clone().scatter_add_(1, torch.arange(16).reshape(4, 4).to(x.device) % 4, x.clone())
    x.flatten(0, 1)[..., 2] = -1
    return x


def _circular_padding(x, row, images):
    weight = torch.linspace(-1, 1, 48).reshape(4, 2, 3, 2).to(x.device)
    padded = F.pad(images, (1, 1, 1, 1), mode="circular")
    return F.conv2d(padded, weight, stride=2).div_(images[:, :1, :3, :4] + 2)


@pytest.mark.parametrize(
    ("program", "layout"),
    [
        (_index_copy, P("x", ("y", "z"))),
        (_scatter_add_then_view, P(("x", "y"), "z")),
        (_circular_padding, P()),
    ],
)
def test_writes_at_one_place_on_a_mesh(program, layout):
    """XLA wrote another element: lowerings/one_index_scatter.py."""
    mesh = iso.make_mesh((2, 2, 2), ("x", "y", "z"))
    source = torch.Generator().manual_seed(0)
    x, row = torch.randn(4, 4, generator=source), torch.randn(1, 4, generator=source)
    images = torch.rand(1, 2, 5, 6, generator=source)
    layouts = (layout, P(None, *layout[1:]), P(None, "y", None, "x"))
    split = [iso.shard(t, mesh, spec) for t, spec in zip((x, row, images), layouts, strict=True)]
    torch.testing.assert_close(program(*split).cpu(), program(x, row, images))


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P(("x", "y"))])
@pytest.mark.parametrize(("dim", "count"), [(1, 1), (1, 3), (0, 2)])
def test_adding_over_a_mesh(spec, dim, count):
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=generator)
    shape = (8, count) if dim else (count, 16)
    index = torch.randint(0, x.shape[dim], shape, generator=generator)
    source = torch.randn(shape, generator=generator)
    expected = x.scatter_add(dim, index, source)
    got = iso.shard(x, mesh, spec).scatter_add(dim, index.to("jax"), source.to("jax"))
    torch.testing.assert_close(got.cpu(), expected)


def test_the_gradient_of_a_gather_stays_where_the_batch_is():
    mesh = iso.make_mesh((8,), ("x",))
    scores = iso.shard(torch.randn(16, 32), mesh, P("x")).requires_grad_()
    labels = iso.shard(torch.randint(0, 32, (16, 1)), mesh, P("x"))

    @xs.compile
    def step(scores, labels):
        return torch.autograd.grad(scores.gather(1, labels).sum(), scores)

    (gradient,) = step(scores, labels)
    assert {found.bytes for found in collectives(xs.program_text(step))} <= {4}
    expected = torch.zeros(16, 32).scatter(1, labels.cpu(), 1.0)
    torch.testing.assert_close(gradient.cpu(), expected)
