"""`iso.jax_function(module, repeat="auto")`: equal layers as a loop that JAX differentiates."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso
from isoshard import P, metrics
from isoshard.core.runtime.hlo_text import parsed
from isoshard.core.runtime.jaxprs import equations
from isoshard.planner.programs.device_ops import device_ops
from isoshard.planner.programs.hlo_liveness import liveness
from tests.planner.torch_steps.steps import llama

WIDTH = 8
X = jnp.linspace(-1.0, 1.0, 4 * WIDTH).reshape(4, WIDTH)


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -2 * gradient


class Halved(torch.autograd.Function):
    """The identity, with another one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Layer(nn.Module):
    """A residual layer; `own` is applied to what it adds."""

    def __init__(self, own=None, dropout=0.0):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own, self.dropout = own, dropout

    def forward(self, x):
        y = F.dropout(torch.tanh(self.linear(self.norm(x))), self.dropout)
        return x + (y if self.own is None else self.own.apply(y))


def stack(layers=3, *owns, dropout=0.0):
    torch.manual_seed(0)
    owns = owns or (None,)
    return nn.Sequential(*[Layer(owns[n % len(owns)], dropout) for n in range(layers)])


def both(module, **options):
    """The function as it is, and with loops."""
    return iso.jax_function(module, **options), iso.jax_function(module, repeat="auto", **options)


def gradient(f, key=None):
    return jax.value_and_grad(lambda params: (f(params, X, rng=key) ** 2).sum())


def said():
    return [line for line in metrics.report().splitlines() if line.startswith("repeat: ")]


def close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, other)


def test_values_and_gradients(counted):
    """Also of layers that drop."""
    plain, rolled = both(stack(4, dropout=0.4))
    key = jax.random.key(3)
    want = jax.jit(gradient(plain, key))(plain.params)
    close(jax.jit(gradient(rolled, key))(rolled.params), want)
    assert "3 layers as 2 loops" in said()[0]


def test_the_gradient_does_not_grow_with_depth():
    sizes = []
    for layers in (4, 8):  # the first layer stands alone: nobody wants the gradient of its input
        f = iso.jax_function(stack(layers), repeat="auto")
        program = jax.make_jaxpr(gradient(f))(f.params)
        work = [one for one in equations(program) if one.primitive.name in ("dot_general", "tanh")]
        sizes.append(len(work))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("owns", [(Reversed,), (Halved, None)])
def test_gradients_of_their_own_are_kept(owns, counted):
    plain, rolled = both(stack(4, *owns))
    close(jax.jit(gradient(rolled))(rolled.params), jax.jit(gradient(plain))(plain.params))
    if len(owns) == 1:
        assert said()[0].startswith("repeat: 3 layers as 2 loops")


def test_custom_vjp_of_jax_is_kept(counted):
    @jax.custom_vjp
    def tripled(x):
        return jnp.sin(x)

    tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))
    called = iso.torch_function(tripled)

    class Own:
        apply = staticmethod(called)

    plain, rolled = both(stack(3, Own))
    close(jax.jit(gradient(rolled))(rolled.params), jax.jit(gradient(plain))(plain.params))
    assert said()


def test_buffers_come_back():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    plain, rolled = both(nn.Sequential(*layers))

    def run(f):
        return jax.jit(f.with_buffers)(f.parameters, f.buffers, X)

    close(run(rolled), run(plain))


def test_transformations():
    plain, rolled = both(stack(3))
    changes = (
        lambda f: jax.vmap(lambda x: f(f.params, x))(X[:, None]),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(f.params, x).sum())(X),
        lambda f: jax.lax.scan(lambda x, _: (f(f.params, x), None), X, None, length=2)[0],
        lambda f: jax.jvp(jax.grad(lambda x: f(f.params, x).sum()), (X[:1],), (X[:1],))[1],
    )
    close(*(jax.jit(lambda f=f: [change(f) for change in changes])() for f in (rolled, plain)))


def test_arrays_of_the_caller_are_stacked_as_well(counted):
    """Outside of JAX it runs as it is."""
    plain, rolled = both(stack())
    want = jax.jit(lambda x: plain(plain.params, x))(X)
    close(rolled(rolled.params, X), want)
    assert not said()
    close(jax.jit(lambda x: rolled(rolled.params, x))(X), want)
    assert said()[0].startswith("repeat: 3 layers as 1 loop")


def test_on_meshes():
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    on = jax.make_mesh((2, 4), ("x", "y"), types)
    plain, rolled = both(stack(3))
    x = jax.device_put(X, jax.NamedSharding(on, P("x", None)))
    lies = jax.NamedSharding(on, P("y"))
    params = {name: jax.device_put(one, lies) for name, one in plain.params.items()}
    close(
        *(jax.jit(jax.grad(lambda p, f=f: (f(p, x) ** 2).sum()))(params) for f in (rolled, plain))
    )


def test_without_equal_layers_there_is_a_reason(counted):
    _, rolled = both(nn.Linear(WIDTH, WIDTH))
    jax.jit(rolled)(rolled.params, X)
    assert said()[0].startswith("repeat: not rolled: ")


def test_plain_functions(counted):
    def function(x, *weights):
        for weight in weights:
            x = torch.tanh(x @ weight) + x.sin() * weight.mean()
        return x

    plain, rolled = both(function)
    weights = [jnp.full((WIDTH, WIDTH), 0.1 * n) for n in range(3)]
    close(jax.jit(rolled)(X, *weights), jax.jit(plain)(X, *weights))
    assert said()[0].startswith("repeat: 3 layers as 1 loop")


def test_other_values_are_refused():
    with pytest.raises(ValueError, match=r"repeat must be None .* got 'all'"):
        iso.jax_function(stack(), repeat="all")


@pytest.mark.parametrize(
    ("rows", "repeat", "loops"), [(2, "auto", 0), (2, "always", 1), (4096, "auto", 1)]
)
def test_loops_that_copy_too_much_are_none(rows, repeat, loops, counted):
    module = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)])
    f = iso.jax_function(module, repeat=repeat)
    program = jax.make_jaxpr(f)(f.params, jnp.ones((rows, 256)))
    names = [one.primitive.name for one in equations(program)]
    assert names.count("scan") == loops
    assert ("not rolled: loops would copy" in said()[0]) is not bool(loops)


class Loss(nn.Module):
    """Of a Llama: its loop would be laid out otherwise by the partitioner, were it not told."""

    def __init__(self):
        super().__init__()
        self.llama = llama(2)

    def forward(self, ids):
        return self.llama(input_ids=ids, labels=ids).loss


def test_a_loop_lies_as_its_layers_written_out():
    """Parameters are split over all devices, and so is the batch: no activation is gathered."""
    on = jax.make_mesh((8,), ("data",))
    functions = both(Loss())

    def put(array):
        sizes = array.shape if array.size > 128 else ()
        axis = next((n for n, size in enumerate(sizes) if size % 8 == 0), None)
        spec = P() if axis is None else P(*[None] * axis, "data")
        return jax.device_put(np.asarray(array), jax.NamedSharding(on, spec))

    def sent(f):
        params = {name: put(one) for name, one in f.parameters.items()}
        kept = {name: put(one) for name, one in f.buffers.items()}
        loss = jax.jit(jax.grad(lambda params, x: f({**params, **kept}, x)))
        x = put(jnp.arange(256).reshape(8, 32))
        module = parsed(loss.lower(params, x).compile().as_text())
        found = collections.Counter()
        for op in device_ops(module, on, liveness(module).at):
            if op.is_collective:
                found[op.name] += op.sent * op.times
        return found

    plain, rolled = map(sent, functions)
    assert set(rolled) == set(plain) == {"all-gather", "all-reduce"}
    assert rolled["all-reduce"] == plain["all-reduce"]
    assert rolled["all-gather"] <= 2 * plain["all-gather"]  # once in each of the two loops
