"""Handlers of torch functions: values, gradients, layouts, what is sent, when they are asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

RNG = np.random.default_rng(0)
A, B = torch.from_numpy(RNG.normal(size=(2, 24)).astype(np.float32))
CALLS = []


def dot_handler(shards, a, b):
    CALLS.append(shards.specs)
    return shards.all_reduce(torch.dot(a, b), shards.axes(a, 0)), P()


def jax_dot_handler(shards, a, b):
    CALLS.append(shards.specs)
    return shards.all_reduce(jnp.dot(a, b), shards.axes(0, 0)), P()


@pytest.fixture(params=["torch", "jax"])
def dot(request):
    """`torch.dot` has a handler, in one framework or the other."""
    handler = dot_handler if request.param == "torch" else jax_dot_handler
    CALLS.clear()
    with xs.register_function_handler(torch.dot, handler, framework=request.param) as handle:
        yield handle


def laid(x, mesh, spec=("x",)):
    return iso.shard(x, mesh, spec)


@pytest.mark.parametrize("spec", [P("x"), P(("y", "x"))])
def test_dot_and_its_gradients(dot, mesh, spec):
    a, b = (laid(x, mesh, spec).requires_grad_() for x in (A, B))
    value = torch.dot(a, b).sin()
    value.backward()
    exact = A.double().dot(B.double()).item()
    np.testing.assert_allclose(value.item(), np.sin(exact), rtol=1e-5)
    np.testing.assert_allclose(a.grad.cpu(), np.cos(exact) * B, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(b.grad.cpu(), np.cos(exact) * A, rtol=1e-4, atol=1e-6)
    assert a.grad.partition_spec == spec
    assert {0: spec, 1: spec} in CALLS


def test_it_is_recorded_and_sends_one_number(dot, mesh, counted):
    a = laid(A, mesh)
    total = torch.dot(a, a) + 1
    assert counted("executions") == 0 and total.local_shards is None
    np.testing.assert_allclose(total.item(), A.dot(A) + 1, rtol=1e-5)
    before = len(CALLS)
    step = xs.compile(lambda a: torch.dot(a, a) + 1)
    assert step(a).item() == total.item() and len(CALLS) == before  # it is not traced again
    text = xs.program_text(step)
    assert text.count(" all-reduce(") == 1
    for word in ("all-gather", "collective-permute", "all-to-all"):
        assert f" {word}(" not in text


def test_a_later_handler_goes_first(dot, mesh):
    a = laid(A, mesh)
    with xs.register_function_handler(
        torch.dot, lambda s, a, b: (s.all_reduce(a.sum() * 0, "x"), P())
    ):
        assert torch.dot(a, a).item() == 0
    assert torch.dot(a, a).item() > 1


def test_where_nothing_is_split_torch_itself_runs(dot, mesh, counted):
    whole = laid(A, mesh, P())
    for a in (A, A.to("jax"), A.to("jax") * 1, whole, whole[:], whole * 1):
        np.testing.assert_allclose(torch.dot(a, a).cpu(), A.dot(A), rtol=1e-5)
    assert not CALLS


def test_methods_operators_and_layers_are_functions_of_their_own(mesh):
    found = []

    def handler(shards, *args, **kwargs):
        found.append(kwargs)
        return torch.relu(args[0]), shards.like(0, 0, 1)

    x = laid(A.reshape(8, 3), mesh, P("x", None))
    with xs.register_function_handler(torch.Tensor.relu, handler):
        assert torch.relu(x).shape == F.relu(x).shape == (8, 3) and not found
        np.testing.assert_array_equal(x.relu().cpu(), A.reshape(8, 3).relu())
        assert found
    found.clear()
    with xs.register_function_handler(F.gelu, handler, check=False):
        nn.GELU(approximate="tanh")(x)
        assert found[0] == {"approximate": "tanh"}
    found.clear()
    with xs.register_function_handler(torch.relu, handler):  # inside a function of torch
        assert F.relu(x).partition_spec == P("x") and found
    found.clear()
    with xs.register_function_handler(torch.Tensor.__matmul__, lambda s, a, b: ((a @ b), P("x"))):
        got = x @ torch.ones(3, 2, device="jax")
    np.testing.assert_allclose(got.cpu(), A.reshape(8, 3) @ torch.ones(3, 2), rtol=1e-5)


def test_kinds_of_results_are_those_of_torch(mesh):
    def handler(shards, x, k, dim=-1):
        values, numbers = torch.topk(x, k, dim)
        assert numbers.dtype == torch.int64
        return (values, numbers), (shards.like(x, 0, None),) * 2

    x = laid(A.reshape(8, 3), mesh, P("x", None))
    with xs.register_function_handler(torch.topk, handler):
        found = torch.topk(x, 2)
    assert found.indices.dtype == torch.int64 and found.values.partition_spec == P("x")
    for own, other in zip(found, torch.topk(A.reshape(8, 3), 2), strict=True):
        np.testing.assert_array_equal(own.cpu(), other)


def test_a_handler_of_jax_may_count_in_32_bits(mesh):
    def handler(shards, x):
        return jnp.argsort(x, -1), shards.like(x, 0, None)

    x = laid(A.reshape(8, 3), mesh, P("x", None))
    with xs.register_function_handler(torch.argsort, handler, framework="jax"):
        found = torch.argsort(x)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.cpu(), A.reshape(8, 3).argsort())


def test_an_autograd_function_keeps_its_backward(mesh):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 100

    def handler(shards, x):
        return Twice.apply(x), shards.like(x, 0)

    x = laid(A, mesh).requires_grad_()
    with xs.register_function_handler(torch.relu, handler):
        torch.relu(x).sum().backward()
    assert x.grad.cpu().tolist() == [100.0] * 24


def test_gradients_of_gradients(dot, mesh, x64):
    a = laid(A.double(), mesh).requires_grad_()
    (first,) = torch.autograd.grad(torch.dot(a, a) ** 2, a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), a)
    exact = A.double().requires_grad_()
    (one,) = torch.autograd.grad(exact.dot(exact) ** 2, exact, create_graph=True)
    (two,) = torch.autograd.grad(one.sum(), exact)
    np.testing.assert_allclose(second.cpu(), two, rtol=1e-10)


def test_in_jax_functions_where_layouts_are_marked(dot, mesh):
    def loss(a):
        a = xs.mark_sharding(a * 2, mesh, ("x",))
        return torch.dot(a, a)

    f = jax.jit(jax.value_and_grad(iso.jax_function(loss)))
    value, gradient = f(laid(jnp.asarray(A.numpy()), mesh))
    np.testing.assert_allclose(value, 4 * A.dot(A), rtol=1e-5)
    np.testing.assert_allclose(gradient, 8 * A, rtol=1e-5)
    assert {0: P("x"), 1: P("x")} in CALLS
