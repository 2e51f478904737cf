"""`torch.compile(model, backend="isoshard")`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from tests.torch_bridge.engine.capture.test_compile import batches

pytestmark = [
    pytest.mark.timeout(900),
    # Dynamo says so of code that it leaves alone, or of its own imports.
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Dynamo without what it traced for other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def net(dropout: float = 0.0, norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity(),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, 4),
    )


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="isoshard", **options)


def test_a_training_run_gives_the_results_of_the_cpu_with_two_compilations(counted):
    plain = net(norm=True)
    model = copy.deepcopy(plain).to("jax")
    fast = compiled(model, dynamic=False)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (model, plain)]
    compilations = []
    for x, y in batches(3):
        losses = []
        for one, optimizer, device in zip((fast, plain), optimizers, ("jax", "cpu"), strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(one(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        compilations.append(counted("compilations"))
    assert compilations[1:] == [compilations[1]] * 2 and compilations[1] <= 3
    for (name, value), want in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value.cpu(), want, rtol=1e-3, atol=1e-5, msg=name)


def test_evaluation_runs_one_program_and_compiles_once(counted):
    plain = net(dropout=0.5).eval()
    fast = compiled(copy.deepcopy(plain).to("jax"))
    xs.sync()
    seen = []
    for number in range(3):
        x = batches(number + 1)[-1][0]
        with torch.no_grad():
            torch.testing.assert_close(fast(x.to("jax")).cpu(), plain(x), rtol=1e-4, atol=1e-5)
        seen.append((counted("compilations"), counted("executions")))
    assert [b - a for (a, _), (b, _) in itertools.pairwise(seen)] == [0, 0]
    assert [b - a for (_, a), (_, b) in itertools.pairwise(seen)] == [1, 1]


def test_dropout_differs_from_call_to_call_and_follows_the_seed():
    fast = compiled(lambda x: (torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)))
    x = torch.ones(64).to("jax")
    torch.manual_seed(2)
    first = [[one.tolist() for one in fast(x)] for _ in range(2)]
    torch.manual_seed(2)
    assert [[one.tolist() for one in fast(x)] for _ in range(2)] == first
    rows = [tuple(row) for pair in first for row in pair]
    assert len(set(rows)) == 4
    assert {value for row in rows for value in row} == {0.0, 2.0}


def test_other_shapes_are_other_programs():
    model = net().to("jax")
    plain = copy.deepcopy(model).to("cpu")
    fast = compiled(model)
    for rows in (8, 5):  # the second makes the size a symbol
        x = batches(1, rows)[0][0]
        torch.testing.assert_close(fast(x.to("jax")).cpu(), plain(x), rtol=1e-4, atol=1e-5)


def test_a_graph_break_goes_on_without_a_graph():
    def branch(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if x.sum() > 0:
            x = x + 1
        return x * 3

    fast = compiled(branch)
    for value in (1.0, -1.0):
        x = torch.full((3,), value)
        assert fast(x.to("jax")).tolist() == branch(x).tolist()
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)data-dependent"):
        compiled(branch, fullgraph=True)(torch.ones(3).to("jax"))


def test_conversions_and_constants_on_the_device_are_no_graph_breaks():
    def convert(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.bfloat16).float().to("jax").detach()
        assert x.device.type == "jax"
        return x + torch.arange(3, device=x.device) + torch.ones(3, device="jax")

    got = compiled(convert, fullgraph=True)(torch.zeros(3).to("jax"))
    assert got.tolist() == [1.0, 2.0, 3.0] and type(got) is xs.XLAShardedTensor


def test_writes_to_arguments_and_views():
    def write(x: torch.Tensor) -> Any:
        x[0].add_(5)
        return x.t(), x.sum(), x

    fast = compiled(write, fullgraph=True)
    for _ in range(2):
        x = torch.ones(2, 3).to("jax")
        turned, total, same = fast(x)
        assert x.tolist() == [[6.0] * 3, [1.0] * 3] and total.item() == 21
        assert turned.tolist() == [[6.0, 1.0]] * 3 and same.tolist() == x.tolist()


def test_layouts_are_kept_and_every_gradient_is_that_of_the_cpu():
    mesh = make_mesh((2, 4), ("x", "y"))
    plain = net()
    plan = iso.Plan({"0.weight": P("y", None), "4.weight": P(None, "y"), "*": P()})
    model = iso.shard(copy.deepcopy(plain), mesh, plan)
    x = batches(1)[0][0].requires_grad_()
    z = iso.shard(x.detach(), mesh, P("x", None)).requires_grad_()
    plain(x).square().sum().backward()
    compiled(model)(z).square().sum().backward()
    torch.testing.assert_close(z.grad.cpu(), x.grad, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert iso.to_jax(model[0].weight.grad).sharding.spec == P("y")


def test_inside_a_compiled_step():
    model = net().to("jax")
    plain = copy.deepcopy(model)
    losses = []
    for one in (compiled(model), plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)

        def step(x: torch.Tensor, one: Any = one, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = xs.compile(step)
        losses.append([run(x.to("jax")).item() for x, _ in batches(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_cpu_tensors_and_options_are_refused():
    model = net()
    x = batches(1)[0][0]
    match = r"(?s)got input \d+ of the traced graph \(shape .*on cpu; move the model and its inputs"
    with pytest.raises(Exception, match=match):
        compiled(model)(x)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"(?s)has no options, but was given"):
        torch.compile(model.to("jax"), backend="isoshard", options={"mode": 1})(x.to("jax"))


def test_cpu_inputs_may_be_moved_inside():
    weight = torch.randn(3, 2)
    on_device = weight.to("jax").requires_grad_()

    def forward(a, b):
        return (a.to("jax") + b.to("jax")).sin() @ on_device

    fast = compiled(forward)
    for _ in range(2):
        a, b = torch.randn(4, 3), torch.randn(4, 3)
        want = (a + b).sin() @ weight
        torch.testing.assert_close(fast(a, b).detach().cpu(), want, rtol=1e-5, atol=1e-5)
    fast(a, b).sum().backward()
    (grad,) = torch.autograd.grad(((a + b).sin() @ weight.requires_grad_()).sum(), weight)
    torch.testing.assert_close(on_device.grad.cpu(), grad, rtol=1e-5, atol=1e-5)


def test_an_operator_without_a_lowering_is_named():
    with torch.library._scoped_library("isoshard_test", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", torch.empty_like, "Meta")
        fast = compiled(lambda x: torch.ops.isoshard_test.unknown(x * 2))
        with pytest.raises(NotImplementedError, match=r"isoshard_test.unknown.*register_lowering"):
            fast(torch.ones(3).to("jax")).cpu()


def test_a_captured_step_still_donates_once_dynamo_was_used(counted):
    """Dynamo's frames hold their variables twice, so references say less than they did."""
    f = torch.compile(lambda x: x + 1, backend="isoshard")
    f(torch.ones(2, device="jax"))
    weight = torch.ones(4, device="jax")
    step = xs.compile(lambda: weight.mul_(2).sum())
    for _ in range(4):
        step()
    assert counted("copies") == 0 and counted("donated_bytes") > 0


def test_numbers_are_computed_in_64_bits():
    """A difference of large floats that change is lost in 32."""
    now = [1e7]

    def late(x: torch.Tensor) -> torch.Tensor:
        return x + (now[0] - 1e7) * 1e3

    compiled = torch.compile(late, backend="isoshard", dynamic=True)
    x = torch.zeros(2, device="jax")
    for number in range(3):
        now[0] = 1e7 + number / 1024
        assert compiled(x).tolist() == [number / 1024 * 1e3] * 2


def test_a_draw_from_a_generator_of_its_own_breaks_the_graph_and_follows_its_seed():
    def noisy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x * 2 + torch.rand(3, device="jax", generator=generator)

    fast, x = compiled(noisy), torch.ones(3, device="jax")

    def twice(call: Any) -> list[list[float]]:
        generator = xs.Generator().manual_seed(3)
        return [call(x, generator).tolist() for _ in range(2)]

    expected = twice(noisy)
    assert expected[0] != expected[1]
    assert twice(fast) == expected


def test_views_at_open_indices_are_those_of_the_call():
    def views(x: torch.Tensor, i: int) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x[i], x[i : i + 2], x.view(5, 6).t()[i], x.unfold(0, 2, 1)[i], y, y[i:]

    fast, x = torch.compile(views, backend="isoshard", dynamic=True), torch.arange(30.0).to("jax")
    for i in (1, 3, -2):
        for found, wanted in zip(fast(x, i), views(x, i), strict=True):
            assert found.tolist() == wanted.tolist()
