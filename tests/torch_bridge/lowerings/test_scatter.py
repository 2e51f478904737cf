"""Writing by indices against CPU torch, and on meshes."""

import pytest
import torch
import torch.nn.functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives
from tests.torch_bridge.lowerings.harness import together
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    COMPLEX,
    CUBE,
    FLOATS,
    HALVES,
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
REDUCTIONS = ("sum", "prod", "amax", "amin", "mean")


def test_index_put():
    with together() as check:
        for indices, shape in (
            ([None, torch.tensor([[0], [2]]), torch.tensor([3, 1])], ()),
            ([torch.tensor([0, 1]), None, torch.tensor([3, -3])], (2, 3)),
        ):
            values = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
            for accumulate in (False, True):
                check(aten.index_put.default, CUBE, indices, values, accumulate)
            check(aten._unsafe_index_put.default, CUBE, indices, values, True)
        for indices, values in (  # at a mask
            ([BOOLS], SCALAR),
            ([BOOLS], torch.arange(8.0)),
            ([BOOLS[:, 0]], ROW),
            ([BOOLS[:, 0]], SOURCE),
            ([None, BOOLS[1]], FLOATS[:, :1]),
            ([torch.zeros(3, 4, dtype=torch.bool)], torch.empty(0)),
        ):
            for accumulate in (False, True):
                check(aten.index_put.default, FLOATS, indices, values, accumulate)
        # Repeated places add up.
        check(aten.index_put.default, INTS, [PLACES], torch.ones(4, dtype=torch.int64), True)
        check(aten.index_put.default, BOOLS, [ONE_EACH], BOOLS[:2], True)
        mask, at = torch.tensor([True, False, True]), [torch.tensor([1, 2, 1])]
        op = aten._unsafe_masked_index_put_accumulate.default
        check(op, ROW, mask, at, torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*The reduce argument of torch.scatter")
def test_scatter():
    nothing = torch.empty(0, dtype=torch.int64)
    with together() as check:
        for values, source, own, reductions in (
            (FLOATS, SOURCE, True, REDUCTIONS),
            (FLOATS, SOURCE, False, REDUCTIONS),
            (INTS, SOURCE.long(), True, REDUCTIONS[::2]),
            (HALVES, SOURCE.bfloat16(), False, REDUCTIONS[::4]),
            (BOOLS, SOURCE > 2, True, REDUCTIONS[1:3]),
        ):
            for reduce in reductions:
                given = (values, 0, INDEX, source, reduce)
                check(aten.scatter_reduce.two, *given, include_self=own, rtol=1e-2)
        for reduce in ("add", "multiply"):  # the old names
            check(aten.scatter.reduce, FLOATS, 0, INDEX, SOURCE, reduce=reduce)
            check(aten.scatter.value_reduce, FLOATS, 1, INDEX, 2.0, reduce=reduce)
        nans = torch.tensor([1.0, NAN, 5.0])
        check(aten.scatter_reduce.two, ROW, 0, torch.tensor([0, 0, 1]), nans, "amax")
        check(aten.scatter.src, SCALAR, 0, torch.tensor(0), torch.tensor(4.0))
        check(aten.scatter.value, ROW, 0, nothing, 4.0)
        check(aten.scatter_add.default, ROW, 0, nothing, torch.empty(0))


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_writes():
    zero = torch.tensor([0])
    with together() as check:
        for dim in (0, -2):
            check(aten.index_add.default, INTS, dim, PLACES, INTS, alpha=2)
            check(aten.index_add.default, COMPLEX, dim, PLACES, COMPLEX)
            check(aten.index_fill.int_Tensor, INTS, dim, ONE_EACH, torch.tensor(9))
        check(aten.index_copy.default, CUBE, 2, torch.tensor([1]), CUBE[:, :, :1])
        check(aten.index_add.default, SCALAR, 0, zero, torch.tensor(3.0))
        check(aten.index_copy.default, SCALAR, 0, zero, SCALAR)
        check(aten.index_fill.int_Scalar, SCALAR, 0, zero, 1.0)
        for reduce in ("prod", "mean", "amax", "amin"):
            for values, own in ((FLOATS, True), (FLOATS, False), (INTS, True)):
                given = (values, 0, PLACES, values.flip(0), reduce)
                check(aten.index_reduce.default, *given, include_self=own)
        for places, accumulate in (([[0, -1], [5, 5]], True), ([0, -1, 5, 4], False)):
            places = torch.tensor(places)
            source = torch.arange(1.0, 5.0).reshape(places.shape)
            check(aten.put.default, FLOATS, places, source, accumulate)


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


def test_writes_at_one_place_on_a_mesh():
    """XLA wrote another element: lowerings/index_updates.py."""
    mesh = iso.make_mesh((2, 2, 2), ("x", "y", "z"))
    source = torch.Generator().manual_seed(0)
    x, row = torch.randn(4, 4, generator=source), torch.randn(1, 4, generator=source)
    images = torch.rand(1, 2, 5, 6, generator=source)
    found = []
    for program, layout in (
        (_index_copy, P("x", ("y", "z"))),
        (_scatter_add_then_view, P(("x", "y"), "z")),
        (_circular_padding, P()),
    ):
        layouts = (layout, P(None, *layout[1:]), P(None, "y", None, "x"))
        given = x, row, images
        split = [iso.shard(t, mesh, spec) for t, spec in zip(given, layouts, strict=True)]
        found.append((program.__name__, program(*split), program(*given)))
    for name, got, want in found:
        torch.testing.assert_close(got.cpu(), want, msg=name)


def test_adding_over_a_mesh():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=generator)
    pairs = []
    for spec in (P("x"), P(None, "y"), P(("x", "y"))):
        split = iso.shard(x, mesh, spec)
        for dim, count in ((1, 1), (0, 2)):
            shape = (8, count) if dim else (count, 16)
            index = torch.randint(0, x.shape[dim], shape, generator=generator)
            source = torch.randn(shape, generator=generator)
            got = split.scatter_add(dim, index.to("jax"), source.to("jax"))
            pairs.append((got, x.scatter_add(dim, index, source)))
    for got, expected in pairs:
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


def test_gradients_of_what_each_row_selects_send_nothing():
    """Of extremes, sorted and counted elements, where the batch is split."""
    x = torch.randn(16, 4, 5, generator=torch.Generator().manual_seed(0))

    def gradients(x):
        x = x.detach().requires_grad_()
        picked = (x.max(1)[0], x.sort(2)[0], x.topk(2, 1)[0], x.median(-1)[0], x.kthvalue(2)[0])
        loss = sum((part.cos() * (n + 1)).sum() for n, part in enumerate(picked))
        return torch.autograd.grad(loss, x)[0]

    step = xs.compile(gradients)
    split = iso.shard(x.to("jax"), iso.make_mesh((2, 4), ("x", "y")), P(("x", "y")))
    torch.testing.assert_close(step(split).cpu(), gradients(x))
    assert not collectives(xs.program_text(step))
    columns = iso.shard(x.to("jax"), iso.make_mesh((2, 4), ("x", "y")), P("x", "y"))
    torch.testing.assert_close(step(columns).cpu(), gradients(x))
