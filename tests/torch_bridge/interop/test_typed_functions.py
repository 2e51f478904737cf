"""`torch_function` of JAX functions written for Explicit axes, on tensors that have types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError
from isoshard.torch_xla_bridge.export import exporting, lowered
from tests.torch_bridge.interop.types_of_arrays import AMBIENT, close, data, on, type_of, typed

__all__ = ["typed"]


class Written:
    """A function that speaks of its types; it keeps those it was traced with."""

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        self.seen = [type_of(x), type_of(w)]
        h = jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=P("x", "y")))
        return jax.sharding.reshard(h, P("x", None))


def plain(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w)


@pytest.fixture
def tensors(typed):
    x, w = data(8, 4), data(4, 8, seed=1)
    made = [iso.shard(x, typed, P("x")), iso.shard(w, typed, P(None, "y"))]
    return [one.requires_grad_() for one in made], [x.requires_grad_(), w.requires_grad_()]


@AMBIENT
def test_a_function_of_types_is_traced_with_those_of_the_tensors(tensors):
    (x, w), (a, b) = tensors
    written = Written()
    y = iso.torch_function(written)(x, w)
    assert written.seen == ["f32[8@x,4]", "f32[4,8@y]"]
    assert iso.sharding_of(y).spec == P("x", None)
    (y**2).sum().backward()
    (plain(a, b) ** 2).sum().backward()
    for got, want in ((x, a), (w, b)):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=1e-5, atol=1e-5)
        assert type_of(iso.to_jax(got.grad)) == type_of(iso.to_jax(got.detach()))
    assert type_of(iso.to_jax(y.detach())) == "f32[8@x,8]"


def test_results_have_types_for_the_next_function(typed, tensors):
    (x, w), _ = tensors
    written = Written()
    f = iso.torch_function(written)
    square = iso.shard(torch.ones(8, 8), typed, P("y", "x"))
    f(f(x, w), square)
    assert written.seen == ["f32[8@x,8]", "f32[8@y,8@x]"]


@AMBIENT
def test_it_does_not_matter_whether_a_tensor_was_computed(tensors):
    (x, w), _ = tensors
    written, h = Written(), x * 2
    f = iso.torch_function(written)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            f(h, w)
        assert "no sharding is declared for argument 0" in "".join(caught.value.__notes__)
        xs.sync()
    xs.mark_sharding(h.detach(), iso.sharding_of(x).mesh, P("x"))
    again = x * 2
    xs.mark_sharding(again, iso.sharding_of(x).mesh, P("x"))
    f(again, w)
    assert written.seen == ["f32[8@x,4]", "f32[4,8@y]"]


@AMBIENT
def test_a_function_that_speaks_of_no_types_takes_every_tensor(tensors):
    (x, w), (a, b) = tensors
    f = iso.torch_function(lambda x, w: jnp.tanh(x @ w))
    torch.testing.assert_close(f(x * 2, w).cpu(), plain(a * 2, b), rtol=1e-5, atol=1e-5)
    turned = iso.torch_function(lambda x: x.T @ x)  # over axes that are split
    torch.testing.assert_close(turned(x * 2).cpu(), (2 * a).T @ (2 * a), rtol=1e-5, atol=1e-5)


def test_a_type_error_of_jax_names_the_function_and_the_line(tensors):
    (x, _), _ = tensors

    def turned(x: jax.Array) -> jax.Array:
        return x.T @ x

    with pytest.raises(ShardingError) as caught:
        iso.torch_function(turned)(x)
    message = str(caught.value)
    assert "turned, called at test_typed_functions.py:" in message
    assert "Contracting dimensions are sharded" in message
    assert "argument 0 as P('x',)" in message and "out_sharding=" in message


def test_tensors_on_different_meshes_are_named(typed, tensors):
    (x, _), _ = tensors
    other = iso.shard(torch.ones(4, 8), jax.make_mesh((8,), ("z",)), P(None, "z"))
    with pytest.raises(ShardingError, match=r"argument 0 on 'x' .*; argument 1 on 'z' \(8"):
        iso.torch_function(Written())(x, other)


@AMBIENT
def test_in_a_compiled_step(counted, tensors):
    (x, w), (a, b) = tensors
    f = iso.torch_function(Written())
    step = xs.compile(lambda x: (f(x, w.detach()) * 3).sum())
    for _ in range(4):
        before = counted("executions")
        got = step(x.detach())
        xs.sync()
    assert counted("executions") - before == 1
    torch.testing.assert_close(got.cpu(), (plain(a, b) * 3).sum().detach(), rtol=1e-4, atol=1e-4)


def test_a_written_function_in_torch_in_jax(typed):
    written = Written()
    inner = iso.torch_function(written)
    f = iso.jax_function(lambda x, w: inner(x, w) * 2)
    x, w = on(typed, data(8, 4).numpy(), "x"), on(typed, data(4, 8, seed=1).numpy(), None, "y")
    for run in (f, jax.jit(f)):
        written.seen = []
        assert type_of(run(x, w)) == "f32[8@x,8]"
    of_x, of_w = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))(x, w)
    assert (type_of(of_x), type_of(of_w)) == ("f32[8@x,4]", "f32[4,8@y]")
    a, b = data(8, 4).requires_grad_(), data(4, 8, seed=1).requires_grad_()
    (plain(a, b) * 2).sum().backward()
    close(of_x, a.grad, rtol=1e-4)  # CPUs add in orders of their own
    close(of_w, b.grad, rtol=1e-4)


class Dense(nnx.Module):
    """Written for Explicit axes."""

    def __init__(self, mesh: jax.sharding.Mesh):
        kernel = on(mesh, data(4, 8).numpy(), "x", "y")
        self.kernel = nnx.Param(kernel)
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.einsum("ij,jk->ik", x, self.kernel[...], out_sharding=P("x", "y"))
        return jax.sharding.reshard(self.norm(h), P("x"))


def test_an_nnx_module_written_for_types(typed):
    with jax.set_mesh(typed):
        model = iso.torch_module(Dense(typed))
    x = iso.shard(data(8, 4), typed, P("x"))
    y = model(x)
    assert iso.sharding_of(y).spec == P("x", None)
    (y * torch.arange(8.0, device="jax")).sum().backward()
    assert type_of(iso.to_jax(model.kernel.grad)) == "f32[4@x,8@y]"


def test_exported_programs_are_the_same_under_a_mesh(typed):
    program = torch.export.export(torch.nn.Linear(4, 2), (data(3, 4),))
    t = iso.shard(data(8, 4), typed, P("x", "y"))
    y = (t @ t.T).sum(0)

    def programs() -> list[Any]:
        text = exporting.to_stablehlo(program).get_stablehlo_text()
        return [
            *(line for line in text.splitlines() if not line.startswith("#loc")),
            lowered.stablehlo([y]),
            lowered.tape_text([y]),
            lowered.bytecode([y])[:4],
        ]

    found = programs()
    assert any("num_partitions = 1 " in line for line in found[:20])
    with jax.set_mesh(typed):
        assert programs() == found
    xs.sync()
