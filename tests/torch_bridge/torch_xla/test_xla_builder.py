"""`call_jax`: torch_xla's way to call a JAX function."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.interop.same_function import identity
from isoshard.torch_bridge.torch_xla.core import xla_builder as xb


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


def test_what_makes_functions_different():
    def make(x):
        return lambda a: a * x

    assert identity(make(1)) != identity(make(1.0))
    assert identity(make(0.0)) != identity(make(-0.0))
    assert identity(make((1, make(2)))) == identity(make((1, make(2))))
    assert identity(make([1])) != identity(make([1]))
    assert identity(make(jnp.sin)) == identity(make(jnp.sin))

    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert identity(even) is even


def test_in_a_training_step_with_a_sharded_model(mesh):
    model = torch.nn.Linear(8, 8).to("jax")
    xs.mark_sharding(model.weight, mesh, ("y", None))
    x = xs.mark_sharding(torch.randn(4, 8).to("jax"), mesh, ("x", None))
    weight, bias, host = model.weight.detach().cpu(), model.bias.detach().cpu(), x.cpu()
    xb.call_jax(jnp.tanh, (model(x),)).sum().backward()
    leaf = weight.clone().requires_grad_()
    torch.tanh(torch.nn.functional.linear(host, leaf, bias)).sum().backward()
    torch.testing.assert_close(model.weight.grad.cpu(), leaf.grad)


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
