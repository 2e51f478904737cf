"""`torch.compile(.., fullgraph=True)` over what lays tensors out: one graph, traced once."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
    wait_tensor,
)
from isoshard.torch_bridge.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from tests.torch_bridge.distributed.graph_counting import (
    ASKS_A_MESH,
    MARKS,
    ONE_GRAPH,
    compiled,
    data,
    elements,
    graphs_of,
)

pytestmark = MARKS

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SPLIT = (S0, R)
SPEC = jax.sharding.PartitionSpec("dp", None)
Unsupported = torch._dynamo.exc.Unsupported


def mesh_of(shape=(2, 4)):
    return init_device_mesh("jax", shape, mesh_dim_names=("dp", "tp"))


PARAMETER = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_gradient(function, x):
    x = x.detach().clone().requires_grad_() if x.device.type == "cpu" else x
    out = function(x)
    torch.autograd.backward([(one * one).sum() for one in out])
    return out, x.grad


def marked(x, mesh, spec):
    y = x * 2
    xs.mark_sharding(y, mesh, spec)
    return y.sin()


def piecewise(x, function, parts=2):
    return torch.cat([function(part) for part in x.chunk(parts)])


VERBS = {
    "redistribute": (lambda x, m: (x * 2).redistribute(m, [R, S1]).sin(), lambda x: (2 * x).sin()),
    "of an input": (lambda x, m: x.redistribute(m, [S1, S0]).sin(), torch.sin),
    "part": (lambda x, m: (x * 2).redistribute(m["tp"], [S1]).sin(), lambda x: (2 * x).sin()),
    "dtypes": (
        lambda x, m: x.redistribute(m, [R, S1], forward_dtype=torch.float32).double() * 2,
        lambda x: x.float().double() * 2,
    ),
    "full_tensor": (lambda x, m: x.sin().full_tensor() * 2, lambda x: x.sin() * 2),
    "grad_placements": (
        lambda x, m: x.full_tensor(grad_placements=[S0, R]).sin(),
        lambda x: x.sin(),
    ),
    "pieces": (
        lambda x, m: DTensor.from_local(x.to_local().cumsum(0), m, SPLIT),
        lambda x: piecewise(x, lambda part: part.cumsum(0)),
    ),
    "sums of pieces": (
        lambda x, m: DTensor.from_local(x.to_local().sum(0), m, [Partial(), R]) * x,
        lambda x: x.sum(0) * x,
    ),
    "distribute_tensor": (
        lambda x, m: x * distribute_tensor(x.detach().sin().clone(), m, [R, S1]),
        lambda x: x * x.detach().sin(),
    ),
    "mark_sharding": (
        lambda x, m: marked(x, m.get_xs_mesh(), (None, "tp")),
        lambda x: (x * 2).sin(),
    ),
    "mark of JAX's": (lambda x, m: marked(x, m.get_jax_mesh(), SPEC), lambda x: (x * 2).sin()),
    "mark with gradient": (
        lambda x, m: xs.mark_sharding_with_gradients(x * 2, m, ("dp", None)).sin(),
        lambda x: (x * 2).sin(),
    ),
    "placements": (
        lambda x, m: x * (2 if x.redistribute(m, [R, S1]).placements[1].is_shard(1) else 3),
        lambda x: x * 2,
    ),
    "mesh": (
        lambda x, m: x * m.size(1) + m["tp"].size() + m.ndim + m.shape[0],
        lambda x: x * 4 + 4 + 2 + 2,
    ),
    "isinstance": (lambda x, m: x * 2 if isinstance(x + 1, DTensor) else x, lambda x: x * 2),
}


def test_one_graph_gives_the_results_and_gradients_of_the_cpu(mesh):
    """All verbs in one graph: each result, and the gradient of the sum of their squares."""
    run, counter = compiled(lambda x: [ours(x, mesh) for ours, _ in VERBS.values()], "isoshard")
    for seed in range(2):
        whole = data(8, 8, seed=seed)
        x = distribute_tensor(whole, mesh, SPLIT).requires_grad_()
        out, grad = with_gradient(run, x)
        want, wanted = with_gradient(lambda x: [plain(x) for _, plain in VERBS.values()], whole)
        for name, got, one in zip(VERBS, out, want, strict=True):
            torch.testing.assert_close(got.detach().cpu(), one.detach(), msg=name)
        torch.testing.assert_close(grad.cpu(), wanted, rtol=1e-6, atol=1e-6)
        assert grad.placements == SPLIT
    assert graphs_of(counter) == 1


RULES = {
    "plain": lambda x, m: DTensor.from_local(x.full_tensor() * 2, m, SPLIT),
    "by name": lambda x, m: DTensor.from_local(
        local_tensor=x.full_tensor(), device_mesh=m, placements=[R, Partial()], run_check=False
    ),
    "several": lambda x, m: DTensor.from_local(
        [x.full_tensor() * n for n in range(8)], m, [S0, S1]
    ),
    "sum of gradients": lambda x, m: DTensor.from_local(
        x.to_local(grad_placements=[S0, Partial()]).sin(), m, SPLIT
    ),
    "pieces come out": lambda x, m: x.to_local().sin(),
    "all_reduce": lambda x, m: all_reduce(x.to_local().sin(), "sum", m["dp"]).wait(),
    "all_gather": lambda x, m: wait_tensor(all_gather_tensor(x.to_local() * 2, 0, (m, "dp"))),
    "reduce_scatter": lambda x, m: reduce_scatter_tensor(x.to_local().sin(), "avg", 1, m["tp"]),
}


def test_gradients_that_follow_a_rule_are_those_without(mesh):
    rules = [rule for name, rule in RULES.items() if ONE_GRAPH or name != "all_reduce"]

    def program(x):
        return [rule(x, mesh) for rule in rules]

    run, counter = compiled(program, "isoshard")
    here, there = (
        with_gradient(f, distribute_tensor(data(8, 8), mesh, SPLIT).requires_grad_())
        for f in (run, program)
    )
    for got, want in zip(here[0], there[0], strict=True):
        torch.testing.assert_close(elements(got), elements(want))
    torch.testing.assert_close(here[1].cpu(), there[1].cpu())
    assert graphs_of(counter) == 1


def test_a_mark_lays_out_what_the_graph_computes(mesh):
    def program(x):
        y = x + 1
        xs.mark_sharding(y, mesh.get_xs_mesh(), (None, "tp"))
        return y

    run, _ = compiled(program, "isoshard")  # nobody uses the mark's result
    got = run(torch.ones(8, 8, device="jax"))
    xs.sync()
    assert got.placements == (R, S1)


@ASKS_A_MESH
def test_what_is_constant_is_guarded():
    meshes = [mesh_of(), mesh_of(), mesh_of((4, 2))]
    state: dict[str, Any] = {"mesh": meshes[0], "placements": [R, S1]}

    def program(x, mesh=None):
        return x.redistribute(mesh or state["mesh"], state["placements"]) * 2

    run, counter = compiled(program, "aot_eager")

    def graphs(x, *args):
        got = run(x, *args)
        want = program(x, *args)
        assert got.placements == want.placements and got.device_mesh == want.device_mesh
        torch.testing.assert_close(got.cpu(), want.cpu())
        return counter.frame_count

    x = distribute_tensor(data(8, 8), meshes[0], SPLIT)
    assert graphs(x) == 1
    state["mesh"] = meshes[1]
    assert graphs(x) == 1  # an equal mesh
    state["placements"] = [Replicate(), Shard(1)]
    assert graphs(x) == 1  # equal placements
    state["placements"] = [Shard(1), Replicate()]
    assert graphs(x) == 2
    assert graphs(distribute_tensor(data(8, 8), meshes[0], [R, S1])) == 3  # where the gradient goes
    state["mesh"] = meshes[2]
    assert graphs(data(8, 8).to("jax")) == 4
    assert graphs(x, meshes[0]) == 5


def test_layouts_that_nobody_asks_for_are_not_guarded(mesh):
    run, counter = compiled(lambda x: x * 2, "aot_eager")
    for placements in ([S0, R], [R, S1], [S0, S1]):
        run(distribute_tensor(data(8, 8), mesh, placements))
    assert graphs_of(counter) == 1


def test_open_sizes(mesh):
    def program(x):
        whole = DTensor.from_local(x.to("jax"), mesh, [R, R], shape=x.shape, stride=x.stride())
        return whole.redistribute(mesh, [S0, S1]).full_tensor().to_local() + 2

    run, counter = compiled(program, "isoshard", dynamic=True)
    for rows in (8, 16):
        x = data(rows, 4).to("jax").requires_grad_()
        out = run(x)
        out.sum().backward()
        torch.testing.assert_close(elements(out)[3], x.detach().cpu() + 2)
        torch.testing.assert_close(x.grad.cpu(), torch.ones(rows, 4, dtype=x.dtype))
    assert graphs_of(counter) == 1


def test_pieces_go_into_a_graph(mesh):
    mine = distribute_tensor(data(8, 8), mesh, [S0, S1]).to_local().detach()
    run, counter = compiled(lambda p, w: (p @ w).sin() * p.sum(), "isoshard")
    w = data(2, 3).to("jax")
    for _ in range(2):
        torch.testing.assert_close(elements(run(mine, w)), elements((mine @ w).sin() * mine.sum()))
    assert graphs_of(counter) == 1


def computed(x, mesh):
    return (x * 2).to_local() + 1


ENDS = {
    "to_local": (computed, "choice of XLA's partitioner.*redistribute"),
    "placements": (lambda x, mesh: x + (x * 2).placements[0].dim, "choice of XLA's partitioner"),
    "leaf": (
        lambda x, mesh: distribute_tensor(x.full_tensor(), mesh, [S0, S1]) * 2,
        "has placements already. Use t.redistribute",
    ),
    "gradient": (
        lambda x, mesh: x * distribute_tensor(PARAMETER, mesh, [R, R]),
        "makes a new leaf, without this tensor's gradient",
    ),
    "mark of an input": (
        lambda x, mesh: xs.mark_sharding(x, mesh.get_xs_mesh(), ("dp", None)) * 2,
        "marks the memory of an input.*mark_sharding_with_gradients",
    ),
    "arguments": (
        lambda x, mesh: x.redistribute(mesh, [S0]) * 2,
        "1 placements .* which has 2 dimensions",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ASKS_A_MESH if "mark" in name else ()) for name in ENDS]
)
def test_what_ends_a_graph_says_what_to_write(name, mesh):
    program, message = ENDS[name]
    x = distribute_tensor(data(8, 8), mesh, SPLIT)
    with pytest.raises(Unsupported, match=rf"(?s)cannot be in a graph here.*{message}"):
        compiled(lambda x: program(x, mesh), "aot_eager", fullgraph=True)[0](x)
    torch.compiler.reset()
    run = torch.compile(lambda x: program(x, mesh), backend="aot_eager")
    if name in ("leaf", "arguments"):  # refused without dynamo too
        with pytest.raises(ValueError, match=r"sharded already|2 dimensions"):
            run(x)
    elif name in ("to_local", "mark of an input"):
        torch.testing.assert_close(elements(run(x)), elements(program(x, mesh)))
