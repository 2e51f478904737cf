"""Arguments whose layout is not known yet, captured steps, and shards of unequal sizes."""

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.core.errors import ShardingError

RNG = np.random.default_rng(1)
A, B = torch.from_numpy(RNG.normal(size=(2, 24)).astype(np.float32))
CALLS = []


def dot_handler(shards, a, b):
    CALLS.append(shards.specs)
    return shards.all_reduce(torch.dot(a, b), shards.axes(a, 0)), P()


@pytest.fixture(autouse=True)
def dot():
    CALLS.clear()
    with xs.register_function_handler(torch.dot, dot_handler):
        yield


def laid(x, mesh, **options):
    return iso.shard(x, mesh, ("x",), **options)


def test_what_is_recorded_is_computed_to_learn_its_layout(mesh, counted):
    a = laid(A, mesh)
    double = a * 2
    total = torch.dot(double, a)
    assert counted("executions") == 1 and CALLS[0] == {0: P("x"), 1: P("x")}
    np.testing.assert_allclose(total.item(), 2 * A.dot(A), rtol=1e-5)
    part = a[:12]
    np.testing.assert_allclose(torch.dot(part, part).item(), A[:12].dot(A[:12]), rtol=1e-5)


def test_what_is_marked_stays_recorded(mesh, counted):
    a = laid(A, mesh)
    double = xs.mark_sharding(a * 2, mesh, ("x",))
    total = torch.dot(double, a)
    assert counted("executions") == 0
    np.testing.assert_allclose(total.item(), 2 * A.dot(A), rtol=1e-5)


def test_results_say_how_they_lie(mesh, counted):
    def handler(shards, x):
        return x * 2, shards.like(x, 0)

    a = laid(A, mesh)
    with xs.register_function_handler(torch.relu, handler, check=False):
        double = torch.relu(a)
        assert double.partition_spec == P("x")
        torch.dot(double, a)
    assert counted("executions") == 0


def test_in_a_captured_step(mesh):
    weight = torch.nn.Parameter(laid(A, mesh))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @xs.compile
    def step(x):
        optimizer.zero_grad()
        scaled = xs.mark_sharding(weight * x, mesh, ("x",))
        loss = torch.dot(scaled, scaled)
        loss.backward()
        optimizer.step()
        return loss

    x = laid(B, mesh)
    exact = A.clone()
    for _ in range(3):
        want = (exact * B).dot(exact * B)
        np.testing.assert_allclose(step(x).item(), want, rtol=1e-4)
        exact = exact - 0.1 * 2 * exact * B * B
    np.testing.assert_allclose(weight.detach().cpu(), exact, rtol=1e-3, atol=1e-6)


def test_a_captured_step_asks_for_a_mark(mesh):
    @xs.compile
    def step(x):
        y = x * 2
        return torch.dot(y, y)

    told = r"in a step that is being captured argument 0 \(shape \(24,\)\), argument 1 .* Mark"
    with pytest.raises(ShardingError, match=told):
        step(laid(A, mesh))


def test_traced_by_jax_it_asks_for_a_mark(mesh):
    import jax

    with pytest.raises(ShardingError, match=r"while JAX traces argument 0 .* has none"):
        jax.jit(iso.jax_function(lambda a: torch.dot(a, a)))(A.numpy())


@pytest.mark.parametrize("sizes", [(5, 2, 7, 4), (0, 3, 9, 6)])
def test_shards_of_unequal_sizes(sizes):
    mesh = make_mesh((4,), ("x",))
    a, b = (laid(x[:18], mesh, uneven="pad", sizes=sizes).requires_grad_() for x in (A, B))
    total = torch.dot(a, b)
    (total * 3).backward()
    np.testing.assert_allclose(total.item(), A[:18].dot(B[:18]), rtol=1e-5)
    assert a.grad.block_sizes == (sizes,)
    np.testing.assert_allclose(a.grad.cpu(), 3 * B[:18], rtol=1e-5)
    np.testing.assert_allclose(b.grad.cpu(), 3 * A[:18], rtol=1e-5)
    step = xs.compile(lambda a: torch.dot(a, a))
    np.testing.assert_allclose(step(a.detach()).item(), A[:18].dot(A[:18]), rtol=1e-5)
    text = xs.program_text(step)
    assert text.count(" all-reduce(") == 1
    assert " all-gather(" not in text and " collective-permute(" not in text


def test_results_in_shards_of_unequal_sizes():
    mesh, sizes = make_mesh((4,), ("x",)), (5, 2, 7, 4)

    def handler(shards, x, **rest):
        total = shards.all_reduce((x * x).sum(), "x").sqrt()
        return 2 * x / total + shards.start(x, 0) * 0, shards.like(x, 0)

    a = laid(A[:18], mesh, uneven="pad", sizes=sizes)
    with xs.register_function_handler(torch.nn.functional.normalize, handler):
        unit = torch.nn.functional.normalize(a, dim=0)
        again = torch.dot(unit, unit)
    assert unit.block_sizes == (sizes,)
    np.testing.assert_allclose(again.item(), 4, rtol=1e-5)
    np.testing.assert_allclose(unit.cpu(), 2 * A[:18] / A[:18].norm(), rtol=1e-5)
