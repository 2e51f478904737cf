"""`torch.autograd.Function`s under JAX keep the gradients that they define."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.torch_xla.experimental.scan import scan


class Clipped(torch.autograd.Function):
    """x * w, with gradients cut off at 1 and doubled; uses every part of a context."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, factor: float, name: str | None = None) -> Any:
        ctx.save_for_backward(x, None, w)
        ctx.factor, ctx.kept = factor, {"double": x * 2}
        index = (x > 0).long()
        ctx.mark_non_differentiable(index)
        return x * w, index, name

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_index: Any, of_name: Any) -> Any:
        x, nothing, w = ctx.saved_tensors
        assert nothing is None and of_name is None and of_index.shape == x.shape
        assert not any(ctx.needs_input_grad[2:])
        gradient = gradient.clamp(-1, 1) * ctx.factor
        return gradient * w, gradient * ctx.kept["double"] / 2, None, None


def model(x: Any, w: Any) -> Any:
    y, index, name = Clipped.apply(torch.sin(x), w, 2.0, "n")
    assert name == "n"
    return (y * 5 * (1 + index)).sum()


def reference(x: np.ndarray, w: np.ndarray) -> Any:
    a, b = torch.tensor(x).requires_grad_(), torch.tensor(w).requires_grad_()
    value = model(a, b)
    return value, torch.autograd.grad(value, (a, b))


def check(run: Any) -> None:
    x, w = np.array([0.3, -0.5, 1.2], np.float32), np.array([1.0, 2.0, -3.0], np.float32)
    value, gradients = run(x, w)
    want, expected = reference(x, w)
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    for got, one in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-5)


def test_values_and_gradients_are_those_of_torch():
    f = iso.jax_function(model)
    check(jax.jit(jax.value_and_grad(jax.checkpoint(f), (0, 1))))


def test_under_vmap_scan_and_shard_map(mesh):
    f = iso.jax_function(model)
    x, w = (np.linspace(*ends, 24, dtype=np.float32).reshape(8, 3) for ends in ((-1, 1), (2, 3)))
    each = (reference(*row)[1] for row in zip(x, w, strict=True))
    want = [np.stack(one) for one in zip(*each, strict=True)]
    gradient, spec = jax.grad(f, (0, 1)), jax.P(("x", "y"))
    mapped = jax.shard_map(
        jax.vmap(gradient), mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)
    )

    @jax.jit
    def alone(x, w):
        scanned = jax.lax.scan(lambda c, v: (c, gradient(*v)), 0, (x, w))[1]
        return jax.vmap(gradient)(x, w), scanned

    sharded = jax.jit(mapped)(iso.shard(x, mesh, spec), iso.shard(w, mesh, spec))
    for got in (*alone(x, w), sharded):
        for one, two in zip(got, want, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)


class Reversed(torch.autograd.Function):
    """With `setup_context`, keywords, and a vjp under that name."""

    @staticmethod
    def forward(x: Any, by: float = 1.0) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.by = inputs

    @staticmethod
    def vjp(ctx: Any, gradient: Any) -> Any:
        return -ctx.by * gradient, None


def test_setup_context_and_gradients_of_gradients():
    f = iso.jax_function(lambda x: Reversed.apply(x, by=3.0) ** 2)
    assert jax.grad(f)(2.0) == -12.0
    assert jax.grad(jax.grad(f))(2.0) == 18.0


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0]


def test_random_numbers_are_those_of_the_key():
    f, x = iso.jax_function(lambda x: Masked.apply(x) + Masked.apply(x) * 10), jnp.ones(64)

    @jax.jit
    def run(key):
        return jax.value_and_grad(lambda v: (f(v, rng=key) ** 2 / 2).sum())(x)

    value, gradient = run(jax.random.key(0))
    out = jax.jit(lambda: f(x, rng=jax.random.key(0)))()
    np.testing.assert_allclose(gradient, out * out)  # the same masks in both passes
    assert set(np.unique(out)) == {0, 1, 10, 11}
    np.testing.assert_allclose(value, (out**2).sum() / 2)
    with pytest.raises(RuntimeError, match="draws random numbers"):
        f(x)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, count: Any) -> Any:
        count.add_(1)
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 7, None


def test_writes_to_arguments_are_seen():
    def code(x: Any) -> Any:
        count = torch.zeros(3, dtype=torch.int64, device=x.device)
        y = x * 1
        out = InPlace.apply(y[:2], count[1:2])
        assert out.shape == (2,)
        return y.sum(), count

    f = jax.jit(jax.value_and_grad(iso.jax_function(code), has_aux=True))
    (value, count), gradient = f(jnp.ones(3))
    assert value == 5.0 and count.tolist() == [0, 1, 0]
    assert gradient.tolist() == [7.0, 7.0, 1.0]


def test_faults_are_those_of_torch():
    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            return x + y

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    f = iso.jax_function(Short.apply)
    assert f(1.0, 2.0) == 3.0
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected 2, got 1\)"):
        jax.grad(f)(1.0, 2.0)


def test_forward_mode_is_made_from_the_backward():
    f = iso.jax_function(lambda x: Reversed.apply(x, by=3.0) ** 2)
    assert jax.jvp(f, (2.0,), (1.0,)) == (4.0, -12.0)
    with pytest.raises(
        NotImplementedError, match=r"backward of this code is not linear.*jax\.grad"
    ):
        jax.jvp(iso.jax_function(model), (jnp.ones(3), jnp.ones(3)), (jnp.ones(3), jnp.ones(3)))


def test_checkpoints_that_are_reentrant():
    def code(w: Any, x: Any) -> Any:
        layer = lambda v: torch.nn.functional.linear(v, w).sin()  # noqa: E731
        return checkpoint(layer, x, use_reentrant=True).sum()

    w, x = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    code(w, x).backward()
    got = jax.jit(jax.grad(iso.jax_function(code), (0, 1)))(jnp.ones((2, 2)), jnp.ones((1, 2)))
    for one, want in zip(got, (w.grad, x.grad), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-6)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Any) -> Any:
        return Reversed.apply(x) * self.weight


@pytest.mark.parametrize(("stacked", "used_before"), [(False, True), (True, False)])
def test_in_the_loop_of_scan_layers(stacked, used_before):
    layers = torch.nn.ModuleList(Scaled() for _ in range(3)).to("jax")
    loop = xs.scan_layers(layers, stacked=stacked)
    if used_before:  # without gradients, and outside of JAX
        with torch.no_grad():
            assert loop(torch.ones(2, device="jax")).tolist() == [8, 8]
    f = iso.jax_function(loop)
    got = jax.jit(jax.grad(lambda x: f(f.params, x).sum()))(jnp.ones(2))
    assert got.tolist() == [-8, -8]


@pytest.mark.parametrize("partition", [None, min_cut_rematerialization_partition])
def test_in_the_loop_of_scan(partition):
    def step(carry: Any, x: Any) -> Any:
        carry = Reversed.apply(carry) * x
        return carry, carry + torch.rand_like(carry) * 0

    f = iso.jax_function(lambda c, x: scan(step, c, x, partition_fn=partition))
    loss = lambda c: sum(one.sum() for one in f(c, jnp.full((3, 2), 2.0), rng=jax.random.key(0)))  # noqa: E731
    assert jax.jit(jax.grad(loss))(jnp.ones(2)).tolist() == [-8 - 2 + 4 - 8] * 2


class Counting(torch.nn.Module):
    """Loops in a loop, all of which write to a buffer; in Python or by `scan`."""

    def __init__(self, by_scan: bool):
        super().__init__()
        self.by_scan = by_scan
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def loop(self, fn: Any, carry: Any, xs_: Any) -> Any:
        if self.by_scan:
            return scan(fn, carry, xs_)
        ys = []
        for x in xs_:
            carry, y = fn(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    def inner(self, carry: Any, x: Any) -> Any:
        self.mean.mul_(1.5).add_(x.detach())
        self.count += 1
        carry = Reversed.apply(carry) * x * self.mean.clone()
        return carry, carry

    def outer(self, carry: Any, x: Any) -> Any:
        self.mean.mul_(0.5)
        carry, ys = self.loop(self.inner, carry, x)
        return carry, ys.sum() + self.mean.sum()

    def forward(self, carry: Any, x: Any) -> Any:
        carry, ys = self.loop(self.outer, carry, x)
        return carry.sum() + ys.sum()


def test_in_loops_that_write_to_buffers():
    c, x = jnp.array([0.3, -0.2]), jnp.arange(1, 13.0).reshape(3, 2, 2) / 5
    found = []
    for by_scan in (False, True):
        module = Counting(by_scan).to("jax")
        f = iso.jax_function(module)
        gradient = jax.jit(jax.grad(lambda c, f=f: f(f.params, c, x)))(c)
        found.append((gradient, jax.jit(f.with_buffers)(f.parameters, f.buffers, c, x)))
        assert module.mean.tolist() == [1, 1] and module.count.item() == 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *found)
    assert found[1][1][1]["count"] == 6
