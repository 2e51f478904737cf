"""Activations of a plan on torch modules: hooks by module name, in every way a module is run."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.activations import Activation


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, *, scale: Any = None) -> Any:
        h = torch.tanh(self.up(x))
        return x + self.down(h if scale is None else h * scale)


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return {"a": x * 2, "b": [x + 1, "text"]}


def model(depth: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(depth))).to("jax")


def test_outputs_inputs_and_gradients_are_constrained(mesh):
    blocks = model()
    x = torch.ones(4, 8, device="jax", requires_grad=True)
    want = blocks(x)
    plan = Plan(activations={"*.up": P("x", "y"), "1": Activation(input=P("x"), output=P())})
    seen = {}
    with xs.constrain_activations(blocks, mesh, plan) as handle:
        assert set(handle.modules) == {"0.up", "1", "1.up"}
        assert repr(handle).startswith("ActivationConstraints('0.up' by '*.up', '1' by '1'")
        blocks[0].up.register_forward_hook(lambda m, i, out: seen.update(up=out))
        blocks[1].register_forward_pre_hook(lambda m, args: seen.update(into=args[0]))
        out = blocks(x)
        seen["up"].retain_grad()
        out.square().sum().backward()
        xs.sync()
        assert iso.sharding_of(seen["up"].detach()).spec == P("x", "y")
        assert iso.sharding_of(seen["up"].grad).spec == P("x", "y")
        assert iso.sharding_of(seen["into"].detach()).spec in (P("x"), P("x", None))
    torch.testing.assert_close(out.cpu(), want.cpu())
    assert not blocks[1]._forward_hooks and not blocks[0].up._forward_pre_hooks
    handle.remove()
    blocks(x)
    assert seen["up"].sharding_spec == ""


def test_a_mapping_of_paths_in_nested_outputs_and_arguments(mesh):
    pair = Pair().to("jax")
    both = {
        "": Activation(
            input={"0": P("x"), "extra": P(None, "y")}, output={"a": P("y"), "b.0": P(None, "x")}
        )
    }
    pair.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    seen: dict[str, Any] = {}
    xs.constrain_activations(pair, mesh, both)
    pair.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    out = pair(torch.ones(4, 4, device="jax"), extra=torch.ones(4, 4, device="jax"))
    specs = [t.named_sharding.spec for t in (out["a"], out["b"][0], seen["extra"])]
    assert specs == [P("y"), P(None, "x"), P(None, "y")]
    assert out["b"][1] == "text"


def test_an_axis_left_to_the_compiler(mesh):
    layer = torch.nn.Linear(8, 16).to("jax")
    xs.constrain_activations(layer, mesh, {"": P(P.UNCONSTRAINED, "y")})
    x = iso.shard(torch.ones(4, 8), mesh, P("x")).requires_grad_()
    out = layer(x)
    out.sum().backward()
    xs.sync()
    assert iso.sharding_of(out.detach()).spec == P("x", "y")


def test_under_jax_function(mesh):
    blocks = model()
    xs.constrain_activations(blocks, mesh, {"0": P("x", "y")})
    f = iso.jax_function(blocks[0])
    loss = jax.jit(jax.value_and_grad(lambda p, x: f(p, x).sum()))
    text = loss.lower(f.params, jnp.ones((4, 8))).as_text()
    assert text.count("sharding_constraint") >= 2  # of the output, and of its gradient
    assert jax.jit(f)(f.params, jnp.ones((4, 8))).sharding.spec == P("x", "y")


def test_in_a_compiled_step(mesh):
    blocks = model()
    plan = {"*.up": P("x", "y"), "*": P("x")}
    want = model()
    xs.constrain_activations(blocks, mesh, plan)

    def make(blocks: Any) -> Any:
        optimizer = torch.optim.SGD(blocks.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            out = blocks(x)
            out.square().mean().backward()
            optimizer.step()
            return out

        return step

    step, plain, x = xs.compile(make(blocks)), make(want), torch.ones(4, 8, device="jax")
    for _ in range(3):
        out = step(x)
        torch.testing.assert_close(out.cpu(), plain(x).cpu(), rtol=1e-5, atol=1e-5)
    assert iso.sharding_of(out.detach()).spec in (P("x"), P("x", None))


def test_in_the_loop_of_scan_layers(mesh):
    blocks = model(3)
    want = copy.deepcopy(blocks)(torch.ones(4, 8, device="jax")).cpu()
    loop = xs.scan_layers(blocks)
    x = torch.ones(4, 8, device="jax", requires_grad=True)
    torch.testing.assert_close(loop(x).cpu(), want)  # a loop without constraints
    handle = xs.constrain_activations(loop, mesh, {"*.up": P("x", "y")})
    out = loop(x)
    out.sum().backward()
    torch.testing.assert_close(out.cpu(), want)
    assert "f32[2,4]" in text_of(loop)  # a device's block of the 4 x 16 values
    handle.remove()
    assert "f32[2,4]" not in text_of(loop)


def text_of(loop: Any) -> str:
    step, x = xs.compile(lambda x: loop(x)), torch.ones(4, 8, device="jax")
    step(x)
    return xs.program_text(step)


def test_mistakes(mesh):
    blocks = model()
    x = torch.ones(4, 8, device="jax")
    with pytest.raises(
        PlanError, match=r"no activation rule .* Sequential; its modules are '', '0'"
    ):
        xs.constrain_activations(blocks, mesh, {"nothing": P("x")})
    with xs.constrain_activations(blocks, mesh, {"1.up": P(None, None, "x")}):
        with pytest.raises(PlanError, match=r"the output of module '1.up' cannot be sharded"):
            blocks(x)
    with xs.constrain_activations(blocks, mesh, {"0": P("x")}):
        with pytest.raises(PlanError, match=r"output of module '0' .*\n.*3"):
            blocks(x[:3])
    with xs.constrain_activations(blocks, mesh, {"0": {"1": P("x")}}):
        with pytest.raises(PlanError, match="there is no array at '1'; the arrays are at ''"):
            blocks(x)
    plain = Block()
    with xs.constrain_activations(plain, mesh, {"up": P("x")}):
        with pytest.raises(ShardingError, match=r"output of module 'up' .* on cpu; move the model"):
            plain(x.cpu())
