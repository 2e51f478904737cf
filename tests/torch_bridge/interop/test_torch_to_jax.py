"""`jax_function`: torch code under jit, grad and vmap gives torch's own numbers."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh

functional = torch.nn.functional


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )


def cnn() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 4),
    ).eval()


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(layer, torch.nn.Linear(8, 4))


MODELS = {"mlp": (mlp, (5, 6)), "cnn": (cnn, (5, 2, 6, 6)), "encoder": (encoder, (5, 3, 8))}


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_torch(name, device):
    build, shape = MODELS[name]
    want, x = build(), data(*shape)
    want(x).square().mean().backward()
    model = copy.deepcopy(want).to(device)
    f = iso.jax_function(model)
    array = jnp.asarray(x.numpy())
    loss = jax.jit(jax.value_and_grad(lambda p: jnp.mean(f(p, array) ** 2), allow_int=True))
    value, gradients = loss(f.params)
    np.testing.assert_allclose(value, want(x).square().mean().item(), rtol=1e-4)
    for key, parameter in want.named_parameters():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5)
    assert isinstance(jax.jit(f)(f.params, array), jax.Array)


def test_the_gradient_of_the_input_and_higher_derivatives():
    model, x = mlp(), data(6)
    f = iso.jax_function(model)
    scalar = lambda v: f(f.params, v).sum()  # noqa: E731
    want = torch.autograd.functional.hessian(lambda v: model(v).sum(), x)
    np.testing.assert_allclose(jax.hessian(scalar)(x.numpy()), want, rtol=1e-3, atol=1e-5)
    jvp = jax.jvp(lambda v: f(f.params, v), (x.numpy(),), (np.ones(6, np.float32),))[1]
    want = torch.autograd.functional.jvp(model, x, torch.ones(6))[1]
    np.testing.assert_allclose(jvp, want, rtol=1e-3, atol=1e-5)


def test_vmap_of_inputs_parameters_and_gradients():
    model, x = mlp(), data(5, 6)
    f = iso.jax_function(model)
    np.testing.assert_allclose(
        jax.vmap(f, (None, 0))(f.params, x.numpy()), model(x).detach(), rtol=1e-4, atol=1e-5
    )
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), f.params)
    assert jax.vmap(f, (0, None))(stacked, x.numpy()).shape == (2, 5, 4)
    per_example = jax.vmap(jax.grad(lambda p, v: f(p, v).sum()), (None, 0))(f.params, x.numpy())
    model(x).sum().backward()
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(per_example[key].sum(0), parameter.grad, rtol=1e-3, atol=1e-4)


def test_parameters_share_the_modules_buffers():
    model = mlp().to("jax")
    f = iso.jax_function(model)
    for name, parameter in model.named_parameters():
        want = iso.to_jax(parameter.detach()).unsafe_buffer_pointer()
        assert f.params[name].unsafe_buffer_pointer() == want


def test_parameters_of_a_sharded_module_keep_buffers_and_layouts():
    mesh = make_mesh((2, 4), ("x", "y"))
    model = iso.shard(mlp(), mesh, Plan({"0.weight": P("y", None), "*": P()}))
    f = iso.jax_function(model)
    assert f.params["0.weight"].sharding.spec == P("y")
    shards = [s.data.unsafe_buffer_pointer() for s in f.params["0.weight"].addressable_shards]
    held = iso.local_shards(model[0].weight.detach(), framework="torch")
    assert shards == [s.data.data_ptr() for s in held]
    x = jax.device_put(data(8, 6).numpy(), jax.NamedSharding(mesh, P("x")))
    np.testing.assert_allclose(
        jax.jit(f)(f.params, x), mlp()(data(8, 6)).detach(), rtol=1e-4, atol=1e-5
    )


def test_parameters_are_the_present_ones_and_training_goes_on_in_torch():
    model = mlp().to("jax")
    f = iso.jax_function(model)
    old = f.params["3.bias"]
    before = np.asarray(old).copy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(data(5, 6).to("jax")).sum().backward()
    optimizer.step()
    xs.sync()
    np.testing.assert_array_equal(old, before)
    np.testing.assert_array_equal(f.params["3.bias"], model[3].bias.detach().cpu())
    assert not np.array_equal(f.params["3.bias"], before)


def test_dropout_needs_a_key_and_follows_it():
    f = iso.jax_function(torch.nn.Dropout(0.5))
    x = jnp.ones(64)
    with pytest.raises(RuntimeError, match=r"draws random numbers.*rng=jax\.random\.key.*eval"):
        f({}, x)
    with pytest.raises(RuntimeError, match=r"draws random numbers"):
        jax.jit(f)({}, x)
    run = jax.jit(lambda key: f({}, x, rng=key))
    first, again, other = (run(jax.random.key(n)) for n in (0, 0, 1))
    assert jnp.array_equal(first, again) and not jnp.array_equal(first, other)
    assert set(np.unique(first)) == {0.0, 2.0}
    twice = iso.jax_function(lambda v: (functional.dropout(v), functional.dropout(v)))
    a, b = twice(x, rng=jax.random.key(0))
    assert not jnp.array_equal(a, b)


def test_wrong_parameter_names_are_listed():
    f = iso.jax_function(torch.nn.Linear(2, 2))
    with pytest.raises(KeyError, match=r"unknown are \['wieght'\], missing are \['weight'\]"):
        f({"wieght": f.params["weight"], "bias": f.params["bias"]}, jnp.ones((1, 2)))
    with pytest.raises(TypeError, match=r"module or a function of tensors, not int"):
        iso.jax_function(3)


def test_functions_with_nested_arguments_and_results():
    @iso.jax_function
    def f(inputs: dict[str, Any], scale: float, *, flip: bool = False) -> Any:
        total = inputs["a"] + inputs["b"][0] * scale
        return {"total": -total if flip else total, "pair": (total.sum(), None), "n": 3}

    inputs = {"a": jnp.ones(2), "b": [jnp.arange(2.0)]}
    got = jax.jit(lambda i: f(i, 2.0, flip=True)["total"])(inputs)
    np.testing.assert_array_equal(got, [-1, -3])
    got = f(inputs, 2.0)
    assert got["n"] == 3 and got["pair"][1] is None and float(got["pair"][0]) == 4


def test_in_place_work_stays_inside():
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[1:].add_(10)
        y.t_() if y.dim() == 2 else y
        x.mul_(0)
        return y + x

    f = iso.jax_function(body)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(f)(x), [0, 11, 12])
    np.testing.assert_array_equal(f(x), [0, 11, 12])
    np.testing.assert_array_equal(x, [0, 1, 2])
    np.testing.assert_array_equal(jax.grad(lambda v: f(v).sum())(x), [1, 1, 1])


def test_buffers_of_batch_norm_are_not_touched():
    model = torch.nn.BatchNorm1d(3).to("jax")
    f = iso.jax_function(model)
    jax.jit(f)(f.params, jnp.asarray(data(4, 3).numpy()))
    assert model.running_mean.tolist() == [0, 0, 0]
    assert model.num_batches_tracked.item() == 0


def test_module_and_engine_are_whole_after_tracing_and_after_errors():
    model = mlp().to("jax")
    before = {name: id(p) for name, p in model.named_parameters()}
    f = iso.jax_function(model)
    jax.jit(f)(f.params, jnp.ones((2, 6)))

    def fails(v: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match="by the user"):
        jax.jit(iso.jax_function(fails))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"Abstract tracer value encountered"):
        jax.jit(iso.jax_function(lambda v: v * v.sum().item()))(jnp.ones(2))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    model(data(2, 6).to("jax")).sum().backward()
    assert model[0].weight.grad.shape == (16, 6)
    assert "traced" not in repr(model[0].weight)


def test_marks_inside_become_constraints():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    f = iso.jax_function(lambda v: xs.mark_sharding(v * 2, mesh, ("x",)))
    assert jax.jit(f)(jnp.arange(8.0)).sharding.spec == P("x")


def test_integers_and_dtypes_pass_through():
    f = iso.jax_function(lambda i, t: functional.embedding(i, t))
    table = jnp.arange(6.0).reshape(3, 2).astype("bfloat16")
    got = jax.jit(f)(jnp.array([2, 0]), table)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype("float32"), [[4, 5], [0, 1]])


def test_scan_and_remat_over_torch_code():
    f = iso.jax_function(lambda h, x: torch.tanh(h + x))
    xs_ = jnp.linspace(-1, 1, 5)
    final, _ = jax.lax.scan(lambda h, x: (jax.checkpoint(f)(h, x), None), jnp.zeros(()), xs_)
    want = torch.zeros(())
    for x in np.asarray(xs_):
        want = torch.tanh(want + float(x))
    np.testing.assert_allclose(final, want, rtol=1e-5)


WITH_INDICES = {
    "max_pool1d": lambda x: functional.max_pool1d(x[None], 2),
    "max_pool2d": lambda x: functional.max_pool2d(x[None], 2),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x[None], 2),
    "max": lambda x: x.max(1).values,
    "min": lambda x: x.min(0)[0],
    "amax": lambda x: x.amax(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "median": lambda x: x.median(1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cumprod": lambda x: x.cumprod(1),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "where": lambda x: torch.where(x > 0, x, x.abs()),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros_like(x[:, 0]).long()),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("name", WITH_INDICES)
def test_operators_are_differentiable_by_jax_as_by_torch(name):
    x = data(4, 4).requires_grad_()
    weigh = lambda y: (y * y.detach().cos()).sum()  # noqa: E731
    weigh(WITH_INDICES[name](x)).backward()
    f = iso.jax_function(WITH_INDICES[name])

    def loss(v: jax.Array) -> jax.Array:
        y = f(v)
        return (y * jnp.cos(jax.lax.stop_gradient(y))).sum()

    got = jax.jit(jax.grad(loss))(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(got, x.grad, rtol=1e-4, atol=1e-5)
