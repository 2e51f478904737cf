"""Flax modules as torch modules: NNX, Linen, functions with pytrees."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x: Any, scale: float = 1.0) -> Any:
        x = self.drop(jax.nn.relu(self.norm(self.first(x))))
        for layer in self.layers:
            x = layer(x) * scale
        return x


class LinenNet(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.Dense(8)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(jax.nn.relu(x))
        self.sow("intermediates", "hidden", x)
        return linen.Dense(3)(x)


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    got = got.detach().cpu() if isinstance(got, torch.Tensor) else got
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_names_kinds_and_shared_buffers():
    net = Net(nnx.Rngs(0), 0.5)
    module = iso.torch_module(net)
    assert [name for name, _ in module.named_parameters()] == [
        "first.bias", "first.kernel", "layers.0.bias", "layers.0.kernel", "norm.bias",
        "norm.scale",
    ]  # fmt: skip
    assert {name for name, _ in module.named_buffers()} == {
        "norm.mean", "norm.var", "drop.rngs.key", "drop.rngs.count",
    }  # fmt: skip
    assert set(module.state_dict()) == {n for n, _ in module.named_parameters()} | {
        n for n, _ in module.named_buffers()
    }
    kernel = iso.to_jax(module.get_parameter("layers.0.kernel").detach())
    held = net.layers[0].kernel[...]
    assert kernel.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()
    assert "computed by JAX: Net" in repr(module)


@pytest.fixture(scope="module")
def in_flax():
    """A net that was trained by Flax, its losses, and what it computes in both modes."""
    twin, x, losses = Net(nnx.Rngs(0)), data(6, 4).numpy(), []
    theirs = nnx.Optimizer(twin, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(twin, theirs, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x, scale=0.5) ** 2))(twin)
        theirs.update(twin, gradients)
        return loss

    for _ in range(2):
        losses.append(step(twin, theirs, x))
    state = nnx.to_pure_dict(nnx.state(twin))
    call = nnx.jit(lambda twin, x: twin(x))
    twin.eval()
    evaluated = call(twin, x)
    twin.train()
    return losses, state, evaluated, call(twin, x)


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_nnx_trains_as_in_flax(device, in_flax):
    net, x = Net(nnx.Rngs(0)), data(6, 4)
    before = np.asarray(net.first.kernel[...])
    module = iso.torch_module(net).to(device)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses, state, evaluated, in_training = in_flax
    for want in losses:
        optimizer.zero_grad()
        loss = module(x.to(device), scale=0.5).square().mean()
        loss.backward()
        optimizer.step()
        close(loss, want)
    close(module.get_parameter("layers.0.kernel"), state["layers"][0]["kernel"])
    close(module.get_parameter("norm.scale"), state["norm"]["scale"])
    close(module.get_buffer("norm.mean"), state["norm"]["mean"])
    close(module.get_buffer("norm.var"), state["norm"]["var"])
    module.eval()
    close(module(x.to(device)), evaluated)
    close(module.rebuilt()(x.numpy()), in_training)
    np.testing.assert_array_equal(net.first.kernel[...], before)  # it stayed as it was
    assert not np.allclose(before, state["first"]["kernel"])


def test_random_numbers_are_new_in_each_call_and_follow_the_state():
    module = iso.torch_module(Net(nnx.Rngs(0), 0.5))
    x = data(6, 4).to("jax")
    start = {name: value.clone() for name, value in module.state_dict().items()}
    first, second = module(x).cpu(), module(x).cpu()
    assert module.get_buffer("drop.rngs.count").item() == 2
    assert not torch.equal(first, second)
    module.load_state_dict(start)
    torch.testing.assert_close(module(x).cpu(), first)
    module.eval()
    torch.testing.assert_close(module(x).cpu(), module(x).cpu())
    assert module.get_buffer("drop.rngs.count").item() == 1


def test_linen_with_statistics_modes_and_keys():
    net, x = LinenNet(0.5), data(6, 4)
    variables = jax.jit(net.init)(jax.random.key(0), x.numpy())
    module = iso.torch_module(net, variables, rngs=jax.random.key(1))
    assert "Dense_0.kernel" in dict(module.named_parameters())
    assert {name for name, _ in module.named_buffers()} == {
        "batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var",
        "rngs.dropout.key", "rngs.dropout.count",
    }  # fmt: skip
    got = module(x.to("jax"))
    key = jax.random.fold_in(jax.random.key(1), 0)
    want, updated = jax.jit(
        lambda variables, x: net.apply(
            variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
    )(variables, x.numpy())
    close(got, want)
    close(
        module.get_buffer("batch_stats.BatchNorm_0.mean"),
        updated["batch_stats"]["BatchNorm_0"]["mean"],
    )
    assert not torch.equal(module(x.to("jax")).cpu(), got.cpu())
    module.eval()
    evaluated = jax.jit(net.apply)
    want = evaluated(module.rebuilt(), x.numpy())
    close(module(x.to("jax")), want)
    close(module(x.to("jax"), train=False), want)
    started = iso.torch_module(LinenNet(), init=(jax.random.key(0), x.numpy())).eval()
    close(started(x.to("jax")), evaluated(variables, x.numpy()))


def test_functions_with_pytrees_and_pairs():
    def init(key: Any, width: int) -> Any:
        return {"layers": [{"w": jax.random.normal(key, (width, 2))}], "n": jnp.int32(3), "s": 2.0}

    def apply(tree: Any, x: Any) -> Any:
        return x @ tree["layers"][0]["w"] * tree["n"] * tree["s"]

    tree, x = init(jax.random.key(0), 4), data(3, 4)
    loss = lambda w: apply({**tree, "layers": [{"w": w}]}, x.numpy()).sum()  # noqa: E731
    want = jax.jit(jax.grad(loss))(tree["layers"][0]["w"])
    for module in (
        iso.torch_module(apply, tree),
        iso.torch_module((init, apply), init=(jax.random.key(0), 4)),
    ):
        assert [n for n, _ in module.named_parameters()] == ["layers.0.w"]
        assert [n for n, _ in module.named_buffers()] == ["n"]
        module(x.to("jax")).sum().backward()
        close(module.get_parameter("layers.0.w").grad, want)
        assert module.rebuilt()["s"] == 2.0


def test_a_key_in_a_tree_stays_of_its_kind():
    key = jax.random.key(3, impl="rbg")
    module = iso.torch_module(lambda tree, x: x + jax.random.normal(tree["key"]), {"key": key})
    close(module(torch.zeros(2, device="jax")), np.full(2, jax.random.normal(key)))
    assert str(jax.random.key_impl(module.rebuilt()["key"])) == "rbg"


def test_layouts_stay(mesh):
    plan = iso.Plan({"kernel": P("x", "y"), "*": None})
    net = iso.shard(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), mesh, plan)
    module = iso.torch_module(net)
    assert iso.sharding_of(module)["kernel"].spec == P("x", "y")
    module(torch.ones(2, 8, device="jax")).sum().backward()
    xs.sync()
    assert iso.sharding_of(module.get_parameter("kernel").grad).spec == P("x", "y")


def test_parameters_and_buffers_that_are_tied_later():
    """One tensor of two names is given under both, and its gradient is the sum."""

    class Twins(nnx.Module):
        def __init__(self):
            self.one, self.two = nnx.Param(jnp.ones(3)), nnx.Param(jnp.full(3, 2.0))
            self.first, self.second = nnx.BatchStat(jnp.ones(3)), nnx.BatchStat(jnp.ones(3))

        def __call__(self, x):
            return x * self.one[...] * self.two[...] + self.first[...] - 3 * self.second[...]

    module = iso.torch_module(Twins())
    module.two, module.second = module.one, module.first
    x = data(3)
    out = module(x.to("jax"))
    close(out, x - 2)
    out.sum().backward()
    close(module.one.grad, 2 * x)


def test_in_a_compiled_step(counted):
    module, x = iso.torch_module(Net(nnx.Rngs(0), 0.25)), data(6, 4).to("jax")
    reference = iso.torch_module(Net(nnx.Rngs(0), 0.25))

    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    plain, compiled = make(reference), xs.compile(make(module))
    for _ in range(2):
        close(compiled(x), plain(x).item(), 1e-4)
    for (name, one), (_, two) in zip(
        module.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        np.testing.assert_allclose(one.cpu(), two.cpu(), rtol=1e-3, atol=1e-5, err_msg=name)
    before = counted("executions")
    compiled(x)
    assert counted("executions") == before + 1


def test_copies_and_pickles():
    module, x = iso.torch_module(Net(nnx.Rngs(0))).eval(), data(6, 4).to("jax")
    want = module(x)
    torch.testing.assert_close(copy.deepcopy(module)(x).cpu(), want.cpu())
    pair = iso.torch_module(product, jnp.ones((2, 2)))
    again = pickle.loads(pickle.dumps(pair))
    assert [name for name, _ in again.named_parameters()] == ["value"]
    assert again(torch.ones(2, device="jax")).tolist() == [2, 2]


def product(tree: Any, x: Any) -> Any:
    return tree @ x


class Counting(nnx.Module):
    def __init__(self, how: str):
        self.weight, self.how = nnx.Param(jnp.ones(2)), how

    def __call__(self, x: Any) -> Any:
        if self.how == "makes":
            self.cache = nnx.Variable(x)
        elif self.how == "sows":
            self.sow(nnx.Intermediate, "seen", x)
        elif self.how == "writes":
            self.weight[...] = self.weight[...] + 1
        return x * self.weight[...]


def test_mistakes():
    x = torch.ones(2, device="jax")
    with pytest.raises(
        ValueError, match=r"Counting created the variable cache in a call; .*fixed set"
    ):
        iso.torch_module(Counting("makes"))(x)
    with pytest.raises(ValueError, match="Counting changed the parameter weight in a call"):
        iso.torch_module(Counting("writes"))(x)
    with pytest.warns(DeprecationWarning, match="sow"):  # of Flax; what was sown is dropped
        assert iso.torch_module(Counting("sows"))(x).tolist() == [1, 1]
    with pytest.raises(TypeError, match=r"Net is an NNX module.*torch_module\(model\)"):
        iso.torch_module(Net(nnx.Rngs(0)), {})
    with pytest.raises(TypeError, match=r"LinenNet needs its variables.*init=\(key, example"):
        iso.torch_module(LinenNet())
    with pytest.raises(TypeError, match=r"takes an NNX or Linen module.*not int"):
        iso.torch_module(3, {})
    with pytest.raises(TypeError, match="rngs are for Linen modules"):
        iso.torch_module(jnp.dot, jnp.ones(2), rngs=jax.random.key(0))
    with pytest.raises(ValueError, match=r"torch cannot have .* names of dot: half .*rename them"):
        iso.torch_module(jnp.dot, {"half": jnp.ones(2)})
    with pytest.raises(TypeError, match="Net got tensors on several devices"):
        iso.torch_module(Net(nnx.Rngs(0)))(torch.ones(1, 4))
