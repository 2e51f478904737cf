"""`assume_pure`: the plain function's numbers and gradients, its Python code run once."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_xla_bridge.torch_xla.experimental.assume_pure import (
    PureModule,
    assume_pure,
    assume_pure_torch,
    j2t_autograd,
)

functional = torch.nn.functional


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(torch.nn.Module):
    """BatchNorm, tied weights, a buffer of its own, and a dropout that is off."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x, *, scale=1.0):
        h = functional.gelu(self.first(x)) + self.shift
        return functional.relu(self.norm(self.second(h))) * scale, {"mean": h.mean(), "kind": "x"}


def train(model, x, wrap):
    """Two steps; gradients, losses, and everything the model holds."""
    call = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        y, extra = call(x, scale=2.0)
        assert extra["kind"] == "x"
        loss = y.square().mean() + extra["mean"] * (number + 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses, *model.state_dict().values(), *(p.grad for p in model.parameters()), x.grad]
    return [t.detach().cpu().double() for t in found]


WRAPS = {
    "module": PureModule,
    "closure": lambda model: assume_pure(lambda x, **kw: model(x, **kw)),
    "torch": lambda model: assume_pure_torch(model, use_cache=True),
}


@pytest.mark.parametrize("name", WRAPS)
def test_training_gives_the_same_numbers(x64, name):
    torch.manual_seed(0)
    model, x = Block().double(), data(8, 6).double()
    want = train(copy.deepcopy(model), x.clone().requires_grad_(), lambda m: m)
    got = train(copy.deepcopy(model).to("jax"), x.to("jax").requires_grad_(), WRAPS[name])
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_code_runs_once_for_each_kind_of_call():
    calls = []

    @assume_pure
    def f(x, factor, *, flag=False):
        calls.append((tuple(x.shape), factor, flag))
        return x * factor + flag

    x = torch.ones(3, device="jax")
    for _ in range(3):
        assert f(x, 2).tolist() == [2, 2, 2]
    assert len(calls) == 1
    f(x, 3), f(x, 2.0), f(x, 2, flag=True), f(x[:2], 2), f(x.half(), 2)
    f(x.clone().requires_grad_(), 2)
    assert len(calls) == 7
    with torch.autocast("jax", dtype=torch.bfloat16):
        f(x, 2)
    assert len(calls) == 8


def test_modes_of_modules_are_looked_at():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("jax")

    class Holder:
        def network(self, x):
            return model(x)

    holder, x = Holder(), data(8, 4).to("jax")
    ways = (
        PureModule(model),
        assume_pure(lambda x: model(x)),
        assume_pure(lambda x: holder.network(x)),
    )
    for mode in (True, False, True):
        model.train(mode)
        for pure in ways:
            assert torch.allclose(pure(x).cpu(), copy.deepcopy(model)(x).cpu(), atol=1e-5)


def test_frozen_parameters_and_parameters_put_in_place_of_others():
    model = torch.nn.Linear(3, 3).to("jax")
    pure, closure, x = PureModule(model), assume_pure(lambda x: model(x)), data(2, 3).to("jax")
    (pure(x) + closure(x)).sum().backward()
    model.weight.requires_grad_(False)
    model.weight.grad = model.bias.grad = None
    (pure(x) + closure(x)).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad.tolist() == [4, 4, 4]
    model.weight.requires_grad_(True)
    closure(x).sum().backward()
    assert model.weight.grad is not None
    model.weight = torch.nn.Parameter(torch.zeros(3, 3, device="jax"))
    torch.testing.assert_close(pure(x).cpu(), model.bias.detach().cpu().expand(2, 3))


def test_detach_no_grad_and_custom_functions_are_torchs():
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return grad * 7

    def f(x):
        with torch.no_grad():
            fixed = x * 3
        return x * x.detach() + fixed + Sign.apply(x)

    want = data(5).requires_grad_()
    got = want.detach().to("jax").requires_grad_()
    f(want).sum().backward()
    assume_pure(f)(got).sum().backward()
    torch.testing.assert_close(got.grad.cpu(), want.grad)


def test_random_numbers_are_new_in_each_call_or_those_of_the_seed():
    x = torch.ones(1000, device="jax", requires_grad=True)
    drop = assume_pure(lambda x: functional.dropout(x, 0.5))
    one, two = drop(x), drop(x)
    assert not torch.equal(one.cpu(), two.cpu())
    (grad,) = torch.autograd.grad(one.sum(), x)
    torch.testing.assert_close(grad.cpu(), one.detach().cpu())
    seeded = assume_pure(lambda x: functional.dropout(x, 0.5), add_rng_seed_argument=True)
    one, same = seeded(x, rng_seed=3), seeded(x, rng_seed=torch.tensor(3).to("jax"))
    assert torch.equal(one.cpu(), same.cpu())
    assert not torch.equal(one.cpu(), seeded(x, rng_seed=4).cpu())
    with pytest.raises(TypeError, match="pass rng_seed="):
        seeded(x)
    on_cpu = [seeded(x.detach().cpu(), rng_seed=5) for _ in range(2)]
    assert torch.equal(*on_cpu)


def test_what_is_recorded_again_is_the_same_program(counted):
    model, x = torch.nn.Linear(8, 8).to("jax"), data(2, 8).to("jax")
    compilations = []
    for _ in range(2):
        PureModule(model)(x).sum().backward()
        xs.sync()
        compilations.append(counted("compilations"))
        model.zero_grad()
    assert compilations[1] <= compilations[0] + 1


def test_in_a_compiled_step_and_with_sharded_tensors(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to("jax")
    xs.mark_sharding(model[0].weight, mesh, ("y", None))
    x = xs.mark_sharding(data(4, 8).to("jax"), mesh, ("x", None))

    def gradient(call):
        model.zero_grad()
        call(x).square().mean().backward()
        return model[0].weight.grad

    pure = PureModule(model)
    step, want = xs.compile(lambda: gradient(pure)), gradient(model).cpu()
    for _ in range(2):
        torch.testing.assert_close(step().cpu(), want, rtol=1e-4, atol=1e-5)
    marked = assume_pure(lambda x: xs.mark_sharding(x * 1, mesh, ("x", "y")))
    assert iso.sharding_of(marked(x)).spec == P("x", "y")


def test_pure_in_pure_and_under_jax():
    inner = assume_pure(lambda x: torch.tanh(x) * 2)
    outer = assume_pure(lambda x: inner(x) + inner(x * 2))
    x = data(4).to("jax").requires_grad_()
    outer(x).sum().backward()
    want = x.detach().cpu().requires_grad_()
    (torch.tanh(want) * 2 + torch.tanh(want * 2) * 2).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), want.grad)
    grad = jax.grad(lambda v: iso.jax_function(outer)(v).sum())(jnp.asarray(want.detach().numpy()))
    np.testing.assert_allclose(grad, want.grad, rtol=1e-5)


def test_j2t_autograd_methods_copies_and_the_cpu():
    f, x = j2t_autograd(lambda x: jnp.sin(x) * 2), data(3).to("jax").requires_grad_()
    f(x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.cos(x.detach().cpu()))

    class Thing:
        def __init__(self, factor):
            self.factor = factor

        @assume_pure
        def times(self, x):
            calls.append(1)
            return x * self.factor

    calls, x = [], torch.ones(1, 2, device="jax")
    assert [Thing(n).times(x).tolist() for n in (2, 3)] == [[[2, 2]], [[3, 3]]]
    twice = Thing(2)
    assert twice.times(torch.ones(1)).tolist() == twice.times(torch.ones(1)).tolist() == [2]
    assert len(calls) == 4  # on the CPU it is the function
    module = PureModule(torch.nn.Linear(2, 2).to("jax"))
    assert torch.equal(copy.deepcopy(module)(x).cpu(), module(x).cpu())
    assert list(module.state_dict()) == ["_module.weight", "_module.bias"]


def test_mistakes():
    x = torch.ones(2, device="jax", requires_grad=True)
    with pytest.raises(TypeError, match="assume_pure takes a function, not int"):
        assume_pure(3)
    with pytest.raises(TypeError, match="takes tensors and hashable arguments"):
        assume_pure(lambda x, y: x)(x, {1, 2})
    with pytest.raises(RuntimeError, match="needs the value of a tensor"):
        assume_pure(lambda x: x if x.sum() > 0 else -x)(x)
    h = x * 2
    with pytest.raises(ValueError, match="computed from others which require a gradient"):
        assume_pure(lambda y: y + h)(x)
    with pytest.raises(RuntimeError, match="has no gradients of gradients"):
        torch.autograd.grad(assume_pure(torch.sin)(x).sum(), x, create_graph=True)
