"""A JAX function on torch tensors: values, gradients, sharding, one entry, nothing traced twice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.interop.calling_jax import torch_function


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: torch.Tensor, device: str = "jax") -> torch.Tensor:
    return tensor.clone().to(device).requires_grad_()


def test_nested_arguments_and_results():
    def f(tree, *, scale, offset=None):
        total = tree["a"] @ tree["b"][0] * scale
        return {"total": total, "none": None, "pair": (tree["a"].sum(), offset is None)}

    a, b = data(3, 4), data(4, 5)
    got = torch_function(f)({"a": a.to("jax"), "b": [b.to("jax")]}, scale=2.0)
    torch.testing.assert_close(got["total"].cpu(), a @ b * 2)
    torch.testing.assert_close(got["pair"][0].cpu(), a.sum())
    assert got["none"] is None
    assert bool(got["pair"][1])


def test_gradients_of_several_outputs_integers_and_gradients_of_gradients(x64):
    def jax_f(x, y, n):
        return jnp.tanh(x @ y) * n, (x * n).sum(0), jnp.argmax(x, 1)

    def torch_f(x, y, n):
        return torch.tanh(x @ y) * n, (x * n).sum(0), torch.argmax(x, 1)

    x, y, n = data(3, 4).double(), data(4, 5).double(), torch.tensor(3)
    f = torch_function(jax_f)

    def both(function, device):
        a, b = leaf(x, device), leaf(y, device)
        one, two, index = function(a, b, n.to(device))
        assert not index.requires_grad
        loss = one.square().sum() + two.prod()
        first = torch.autograd.grad(loss, (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (a, b))
        return [t.detach().cpu() for t in (one, two, index, *first, *second)]

    for got, want in zip(both(f, "jax"), both(torch_f, "cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_gradients_through_torch_and_jax_in_one_program(counted):
    w, x = data(4, 4), data(3, 4)
    f = torch_function(lambda h, w: jnp.sin(h @ w))

    def torch_f(h, w):
        return torch.sin(h @ w)

    def loss(function, device):
        a, b = leaf(x, device), leaf(w, device)
        h = function(torch.relu(a * 2), b)
        h = function(h.softmax(-1), b)
        h.square().sum().backward()
        return a.grad, b.grad

    got = loss(f, "jax")
    xs.sync()
    assert counted("executions") == 1
    for one, two in zip(got, loss(torch_f, "cpu"), strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-5, atol=1e-6)


def test_a_function_is_traced_once_and_recorded_as_one_entry(counted):
    traced = []

    def f(x, *, power):
        traced.append(power)
        return x**power

    g = torch_function(f)
    x = leaf(data(5))
    compilations = []
    for _ in range(4):
        x.grad = None
        g(x, power=2).sum().backward()
        xs.sync()
        compilations.append(counted("compilations"))
    assert traced == [2]
    assert compilations[1:] == [compilations[1]] * 3
    before = len(tapes.recorder().program)
    g(x.detach(), power=2)
    assert len(tapes.recorder().program) == before + 2  # the input and the call
    g(x.detach(), power=3), g(x.detach(), power=3.0), g(x.detach()[:2], power=2)
    assert len(traced) == 5  # without gradient, another power, another kind of number, and shape
    xs.sync()


def test_inside_a_compiled_step(counted):
    f = torch_function(lambda h, c: jnp.tanh(h) * c)
    model = torch.nn.Linear(4, 4).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    constant = jnp.float32(2.0)

    def plain(x):
        optimizer.zero_grad()
        loss = f(model(x), constant).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, x = xs.compile(plain), data(3, 4).to("jax")
    losses = [step(x).item() for _ in range(4)]
    reference = torch.nn.Linear(4, 4)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    reference.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    want = (torch.tanh(reference(x.cpu())) * 2).square().mean()
    torch.testing.assert_close(plain(x).detach().cpu(), want.detach())


def test_sharded_tensors_and_shard_map(mesh):
    x = data(8, 4)
    t = xs.mark_sharding(x.to("jax"), mesh, ("x", "y"))

    def local(block):
        return jax.lax.psum(block.sum(), ("x", "y")).reshape(1)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("x", "y"), out_specs=P())
    # Explicit axes: shard_map takes what lies as its in_specs say.
    total = torch_function(lambda a: (mapped(iso.shard(a, mesh, P("x", "y"))), a * 2))
    one, two = total(t)
    torch.testing.assert_close(one.cpu(), x.sum().reshape(1))
    assert iso.sharding_of(two).spec == P("x", "y")
    torch.testing.assert_close(total(x.to("jax"))[0].cpu(), x.sum().reshape(1))


def test_random_keys_arrays_and_numpy_are_inputs():
    traced = []

    def f(key, x, table):
        traced.append(1)
        return jax.random.normal(key, x.shape) + x + table

    g, x = torch_function(f), torch.zeros(3).to("jax")
    for seed in (1, 2):
        got = g(jax.random.key(seed), x, np.ones(3, np.float32))
        np.testing.assert_allclose(got, jax.random.normal(jax.random.key(seed), (3,)) + 1)
    assert traced == [1]


def test_views_and_updates_in_place_are_seen():
    f, x = torch_function(lambda t: t * 10), torch.arange(6.0).reshape(2, 3).to("jax")
    x.t()[0] += 1
    y = f(x.t())
    x.zero_()
    np.testing.assert_array_equal(y, np.array([[10, 40], [10, 40], [20, 50]]))


def test_while_jax_traces():
    f = torch_function(lambda h, shift: jnp.tanh(h) + shift)
    model = torch.nn.Linear(3, 3)

    def code(x):
        return f(model.to("jax")(x), 1.0)

    x = data(2, 3)
    want = torch.tanh(model(x)) + 1
    got = jax.jit(iso.jax_function(code))(jnp.asarray(x))
    np.testing.assert_allclose(got, want.detach(), rtol=1e-5)

    @jax.jit
    def around(scale, y):
        return iso.jax_function(torch_function(lambda t: t * scale))(y)

    np.testing.assert_allclose(around(3.0, jnp.ones(2)), [3, 3])
    np.testing.assert_allclose(around(4.0, jnp.ones(3)), [4, 4, 4])


def test_mistakes():
    f = torch_function(lambda t, n=0: t * n, name="times")
    with pytest.raises(TypeError, match="times takes tensors, arrays and hashable constants"):
        f(torch.ones(2, device="jax"), {1, 2})
    with pytest.raises(TypeError, match="keys gives a result that torch cannot hold"):
        torch_function(lambda: jax.random.key(0), name="keys")()
    with pytest.raises(TypeError, match="torch_function takes a function of JAX arrays, not int"):
        torch_function(3)
    with pytest.raises(TypeError, match=r"got incompatible shapes"):
        torch_function(jnp.add)(torch.ones(2, device="jax"), torch.ones(3, device="jax"))


def test_one_setting_of_precision_does_not_serve_another():
    traced = []
    f, x = torch_function(lambda a: traced.append(1) or a @ a), data(4, 4).to("jax")
    f(x), f(x)
    with jax.default_matmul_precision("highest"):
        f(x)
    assert len(traced) == 2


def test_a_function_keeps_its_name():
    assert torch_function(functools.partial(jnp.multiply, 2.0)).name == "partial"
    assert torch_function(jnp.sin).name == "sin"
