"""`torch.compile(.., fullgraph=True)` over pieces over a part of a mesh, and over alike pieces."""

from __future__ import annotations

import copy

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed._functional_collectives import all_reduce
from isoshard.torch_bridge.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallel,
)
from tests.torch_bridge.distributed.graph_counting import (
    MARKS,
    ONE_GRAPH,
    compiled,
    data,
    elements,
    graphs_of,
)

pytestmark = MARKS

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def written_in_a_view(x, w, mesh):
    mine = x.to_local().clone()
    mine[0].add_(x.redistribute(mesh, [S0, R]).to_local()[0])  # which differs along dp
    return mine @ w


PROGRAMS = {
    "split": (
        "tp",
        [S1],
        lambda x, w, m: DTensor.from_local(x.to_local().cumsum(1), m["tp"], [S1]) @ w,
    ),
    "moved while open": (
        "tp",
        [S0],
        lambda x, w, m: (
            DTensor.from_local(x.to_local() @ w @ w.T, m["tp"], [S0])
            .redistribute(m["tp"], [S1])
            .to_local()
        ),
    ),
    "sum of copies": (
        "tp",
        [R],
        lambda x, w, m: DTensor.from_local(x.to_local() @ w, m["tp"], [Partial()]),
    ),
    "made alike": ("tp", [S0], lambda x, w, m: all_reduce(x.to_local().sin(), "sum", m["tp"]) @ w),
    "over fewer axes": (
        None,
        [S0, R],
        lambda x, w, m: x.to_local()[:2] @ w * x.redistribute(m["tp"], [S0]).to_local().sum(),
    ),
    "written in a view": (None, [R, R], written_in_a_view),
    "turned in place": (
        "tp",
        [S0],
        lambda x, w, m: DTensor.from_local(x.to_local().sum(0) @ w, m["tp"], [Partial()]),
    ),
}
SPLIT_REFUSED = ("made alike", "turned in place")
"""Whose gradients between two graphs are other pieces than was traced, which is refused."""


def test_pieces_and_gradients_are_those_without(mesh):
    """All programs in one graph, each on a tensor of its own that is placed as it wants."""
    names = [name for name in PROGRAMS if ONE_GRAPH or name not in SPLIT_REFUSED]

    def program(given, w):
        return [PROGRAMS[name][2](x, w, mesh) for name, x in zip(names, given, strict=True)]

    run, counter = compiled(program, "isoshard")
    results = []
    for one in (run, program):
        given = [
            distribute_tensor(
                data(8, 8), mesh if part is None else mesh[part], placements
            ).requires_grad_()
            for part, placements, _ in map(PROGRAMS.get, names)
        ]
        w = data(8, 3, seed=9).to("jax").requires_grad_()
        out = one(given, w)
        torch.autograd.backward([(each * each).sum() for each in out])
        kind = [
            (getattr(each, "axes", None), getattr(each, "replicated_axes", None)) for each in out
        ]
        numbers = [elements(each) for each in out]
        results.append(([*numbers, *(x.grad.cpu() for x in given), w.grad.cpu()], kind))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert graphs_of(counter) == 1


def test_extents_may_be_symbols(mesh):
    def program(x):
        return DTensor.from_local(x, mesh["tp"], [R]).redistribute(mesh["tp"], [S0]).to_local() * 2

    run, counter = compiled(program, "aot_eager", dynamic=True)
    for rows in (8, 16):
        x = data(rows, 4).to("jax").requires_grad_()
        run(x).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), torch.full((rows, 4), 2.0, dtype=x.dtype))
    assert graphs_of(counter) == 1


def test_what_pieces_are_is_guarded(mesh):
    run, counter = compiled(lambda p: p * 2, "aot_eager")
    whole = data(8, 8)
    for lies, placements, graphs in (
        (mesh, [R, R], 1),
        (mesh, [R, R], 1),
        (mesh["tp"], [R], 2),
        (mesh["dp"], [R], 3),
    ):
        mine = distribute_tensor(whole, lies, placements).to_local().detach()
        got = run(mine)
        assert got.axes == mine.axes and got.replicated_axes == mine.replicated_axes
        torch.testing.assert_close(elements(got), elements(mine) * 2)
        assert counter.frame_count == graphs
    both = distribute_tensor(data(8, 8), mesh["dp"], [R]).to_local().detach()
    both.mul_(distribute_tensor(data(16, 8), mesh["dp"], [S0]).to_local().detach())
    assert run(both).replicated_axes == frozenset() and counter.frame_count == 4


def test_a_gradient_of_another_kind_is_refused(mesh):
    w = data(8, 3).to("jax").requires_grad_()
    run, _ = compiled(lambda x: x.to_local() @ w, "aot_eager")
    out = run(distribute_tensor(data(8, 8), mesh["tp"], [R]))
    differs = distribute_tensor(data(32, 3), mesh["tp"], [S0]).to_local()
    with pytest.raises(RuntimeError, match=r"over \[\], .* replicated over \['tp'\].*from_local"):
        (out * differs).sum().backward()


def test_marks_are_not_taken_for_whole(mesh):
    marked = mesh.get_xs_mesh()

    def program(x):
        return xs.mark_sharding(x.redistribute(mesh, [R, S0]), marked, ("dp", None)).to_local() * 2

    x = distribute_tensor(data(8, 8), mesh, [R, R])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="to_local cannot be in a graph here"):
        compiled(program, "aot_eager", fullgraph=True)[0](x)
    torch.compiler.reset()
    got = torch.compile(program, backend="aot_eager")(x)
    torch.testing.assert_close(elements(got), elements(program(x)))


def test_a_global_tensor_is_no_local_one(mesh):
    x, part = distribute_tensor(data(8, 8), mesh, [R, R]), mesh["tp"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)is a global one. Call t.to_loc"):
        compiled(lambda x: all_reduce(x * 2, "sum", part) * 2, "aot_eager", fullgraph=True)[0](x)


class Perceptron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden.view(2, -1, hidden.shape[-1]).relu().reshape(hidden.shape))


def test_styles_of_pieces(mesh):
    torch.manual_seed(0)
    plan = {
        "first": parallel.ColwiseParallel(use_local_output=False),
        "last": parallel.RowwiseParallel(),
    }
    plain = Perceptron().double()
    model = parallel.parallelize_module(copy.deepcopy(plain).to("jax"), mesh["tp"], plan)
    run, counter = compiled(model, "isoshard")
    x = DTensor.from_local(data(4, 8).to("jax"), mesh["tp"], [R])
    results = []
    for one in (run, model):
        model.zero_grad()
        out = one(x.to_local())
        (out * out).sum().backward()
        grads = [parameter.grad.cpu() for parameter in model.parameters()]
        results.append(([elements(out), *grads], type(out)))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(elements(out), plain(data(4, 8)).detach())
    assert counter.frame_count == 1


def test_a_whole_made_of_pieces_is_guarded(mesh):
    plan = {"": parallel.RowwiseParallel(input_layouts=R, use_local_output=False)}
    make = parallel.parallelize_module(torch.nn.Linear(8, 8).double().to("jax"), mesh["tp"], plan)
    last = parallel.parallelize_module(
        torch.nn.Linear(8, 8).double().to("jax"), mesh["tp"], parallel.ColwiseParallel()
    )
    run, counter = compiled(lambda x: last(x.view(2, 2, 8)), "aot_eager")
    x = DTensor.from_local(data(4, 8).to("jax"), mesh["tp"], [R])
    for number, given in enumerate((make(x.to_local()), make(x)), 1):
        got, want = run(given), last(given.view(2, 2, 8))
        assert type(got) is type(want) and got.shape == want.shape
        torch.testing.assert_close(elements(got), elements(want))
        assert counter.frame_count == number
