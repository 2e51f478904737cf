"""`jax_function`: torch code under jit, grad, vmap, scan, shard_map gives torch's own numbers."""

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


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 4, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


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
    )


MODELS = {
    "mlp": (mlp, (5, 6)),
    "cnn": (cnn, (5, 2, 6, 6)),
    "lstm": (Recurrent, (4, 3, 3)),
}


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def close(got: Any, want: torch.Tensor, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "device", "remat"),
    [
        ("mlp", "cpu", True),
        ("cnn", "jax", False),
        ("lstm", "cpu", False),
    ],
)
def test_values_and_gradients_are_those_of_torch(x64, name, device, remat):
    """In training mode, in float64, with new buffers."""
    build, shape = MODELS[name]
    model, x = build().double(), data(*shape).double()
    f = iso.jax_function(copy.deepcopy(model).to(device))
    run = jax.checkpoint(f.with_buffers) if remat else f.with_buffers

    def loss(params, buffers, x):
        out, buffers = run(params, buffers, x)
        return jnp.mean(out**2), buffers

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    (value, buffers), (gradients, of_input) = step(f.parameters, f.buffers, x.numpy())
    leaf = x.clone().requires_grad_()
    want = model(leaf).square().mean()
    want.backward()
    close(value, want)
    close(of_input, leaf.grad)
    assert set(gradients) == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        close(gradients[key], parameter.grad)
    assert set(buffers) == {key for key, _ in model.named_buffers()}
    for key, buffer in model.named_buffers():  # as torch has them after its own forward
        close(buffers[key], buffer)
        assert buffers[key].dtype == f.buffers[key].dtype


def test_buffers_are_the_carry_of_a_scan(x64):
    model = torch.nn.BatchNorm1d(3).double()
    f, batches = iso.jax_function(copy.deepcopy(model)), data(4, 6, 3).double()

    def body(buffers, x):
        y, buffers = f.with_buffers(f.parameters, buffers, x)
        return buffers, y

    buffers, ys = jax.jit(lambda b, x: jax.lax.scan(body, b, x))(f.buffers, batches.numpy())
    for got, x in zip(ys, batches, strict=True):
        close(got, model(x))
    for key, buffer in model.named_buffers():
        close(buffers[key], buffer)
    assert buffers["num_batches_tracked"] == 4
    assert f.buffers["num_batches_tracked"] == 0  # the module's own are as they were


def test_buffers_that_the_module_puts_in_place_of_others():
    class Averaged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            return x - self.mean

    model = Averaged()
    f = iso.jax_function(model)
    y, buffers = jax.jit(f.with_buffers)({}, f.buffers, jnp.ones((3, 2)))
    assert buffers["mean"].tolist() == [0.5, 0.5] and y[0].tolist() == [0.5, 0.5]
    assert model.mean.tolist() == [0, 0]


def test_parameters_and_buffers_apart_and_together():
    model = cnn()
    f = iso.jax_function(model)
    assert list(f.parameters) == [name for name, _ in model.named_parameters()]
    assert list(f.buffers) == [name for name, _ in model.named_buffers()]
    assert f.params.keys() == f.parameters.keys() | f.buffers.keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert f.shapes[name].shape == tensor.shape
        if tensor.data_ptr() % 64 == 0 and tensor.dtype == torch.float32:
            assert f.params[name].unsafe_buffer_pointer() == tensor.data_ptr()
    with pytest.raises(KeyError, match=r"parameters of Sequential .*unknown are \['1.num_batches"):
        f.with_buffers(f.params, f.buffers, jnp.ones((1, 2, 6, 6)))
    with pytest.raises(KeyError, match=r"buffers of Sequential .*missing are \['1.num_batches"):
        f.with_buffers(f.parameters, {}, jnp.ones((1, 2, 6, 6)))
    with pytest.raises(TypeError, match="a plain function has no buffers"):
        iso.jax_function(torch.sin).with_buffers({}, {}, 1.0)


def test_a_module_without_values():
    model = cnn()
    values = iso.jax_function(model).params
    f = iso.jax_function(copy.deepcopy(model).to("meta"))
    assert f.shapes == jax.eval_shape(lambda: values)
    x = torch.randn(2, 2, 6, 6)
    out, _ = jax.jit(f.with_buffers)(
        {n: values[n] for n, _ in model.named_parameters()},
        {n: values[n] for n, _ in model.named_buffers()},
        x.numpy(),
    )
    close(out, model(x), 1e-4)
    with pytest.raises(ValueError, match=r"meta device, so 0.weight, .* have no values.*shapes"):
        _ = f.params


def test_tied_parameters_stay_tied(x64):
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, index = tied().double(), torch.tensor([0, 3])
    f = iso.jax_function(copy.deepcopy(model))
    assert list(f.params) == ["0.weight"]
    got = jax.jit(jax.grad(lambda p, i: (f(p, i) ** 2).sum()))(f.params, index.numpy())
    model(index).square().sum().backward()
    close(got["0.weight"], model[0].weight.grad)


def test_training_mode_is_read_at_the_call():
    model = torch.nn.BatchNorm1d(2)
    f, x = iso.jax_function(model), jnp.array([[0.0, 2.0], [2.0, 4.0]])
    run = lambda: jax.jit(lambda x: f(f.params, x))(x)  # noqa: E731
    np.testing.assert_allclose(run(), [[-1, -1], [1, 1]], atol=1e-4)
    model.eval()
    np.testing.assert_allclose(run(), x, atol=1e-4)


def test_masks_of_dropout_follow_the_key():
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.25), torch.nn.Linear(16, 4)
    f, x = iso.jax_function(torch.nn.Sequential(*layers)), data(5, 3, 8).numpy()
    run = jax.jit(lambda key: f(f.params, x, rng=key))
    first, again, other = (run(jax.random.key(n)) for n in (0, 0, 1))
    assert jnp.array_equal(first, again) and not jnp.array_equal(first, other)
    np.testing.assert_allclose(f(f.params, x, rng=jax.random.key(0)), first, rtol=1e-5)
    raw = jax.jit(lambda: f(f.params, x, rng=jax.random.PRNGKey(0)))()
    np.testing.assert_allclose(raw, first, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"draws random numbers.*rng=jax\.random\.key.*eval"):
        f(f.params, x)
    drop, key = iso.jax_function(torch.nn.Dropout(0.25)), jax.random.key(0)
    program = jax.value_and_grad(lambda v: (y := drop({}, v, rng=key)).sum() + 0 * y[0])
    total, gradient = jax.jit(program)(jnp.ones(4000))
    kept = np.asarray(gradient) != 0
    assert abs(kept.mean() - 0.75) < 0.03 and np.unique(gradient).size == 2
    np.testing.assert_allclose(total, kept.sum() / 0.75, rtol=1e-5)


def test_keys_under_vmap_and_scan():
    f, x = iso.jax_function(torch.nn.Dropout(0.5)), jnp.ones((3, 64))
    key = jax.random.key(0)
    same = jax.jit(jax.vmap(lambda v: f({}, v, rng=key)))(x)
    alone = jax.jit(lambda v: f({}, v, rng=key))(x[0])
    assert jnp.array_equal(same[0], same[2]) and jnp.array_equal(same[0], alone)
    keys = jax.random.split(key, 3)
    split = jax.jit(jax.vmap(lambda v, k: f({}, v, rng=k)))(x, keys)
    assert not jnp.array_equal(split[0], split[1])
    scanned = jax.jit(lambda: jax.lax.scan(lambda c, k: (c, f({}, x[0], rng=k)), 0, keys)[1])()
    np.testing.assert_array_equal(scanned, split)


def test_under_shard_map_and_its_gradient(x64, mesh):
    model = cnn().double().eval()
    f, x = iso.jax_function(copy.deepcopy(model)), data(8, 2, 6, 6).double()

    def local(params, x):
        return jax.lax.pmean(jnp.mean(f(params, x) ** 2), ("x", "y"))

    whole = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=P())

    def loss(params, buffers):
        return whole({**params, **buffers}, iso.shard(jnp.asarray(x.numpy()), mesh, P(("x", "y"))))

    value, gradients = jax.jit(jax.value_and_grad(loss))(f.parameters, f.buffers)
    want = model(x).square().mean()
    want.backward()
    close(value, want)
    for key, parameter in model.named_parameters():
        close(gradients[key], parameter.grad)


def test_vmap_of_grad_in_a_scan_with_remat(x64):
    model, x = mlp().double(), data(3, 5, 6).double()
    f = iso.jax_function(copy.deepcopy(model))
    one = jax.checkpoint(lambda p, v: (f(p, v) ** 2).sum())
    body = lambda total, batch: (total + jax.vmap(jax.grad(one, 1), (None, 0))(f.params, batch), 0)  # noqa: E731
    got, _ = jax.jit(lambda x: jax.lax.scan(body, jnp.zeros((5, 6)), x))(x.numpy())
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    close(got, leaf.grad.sum(0))


def test_tensors_that_are_no_buffers_are_constants():
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 2)
            self.scale = torch.tensor([2.0, 3.0])

        def forward(self, x: torch.Tensor) -> Any:
            return x * self.scale + self.table(torch.arange(len(x))), torch.arange(2)

    model = Positions()
    f = iso.jax_function(model)
    got, index = jax.jit(f)(f.params, jnp.ones((3, 2)))
    close(got, model(torch.ones(3, 2))[0], 1e-6)
    assert index.tolist() == [0, 1]


def test_gradients_by_torch_inside_are_torchs():
    def force(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return found

    got = jax.jit(iso.jax_function(force))(jnp.array([1.0, 2.0]))
    assert got.tolist() == [3.0, 12.0]


def test_the_gradient_of_the_input_and_higher_derivatives():
    model, x = mlp(), data(6)
    f = iso.jax_function(model)
    scalar = lambda v: f(f.params, v).sum()  # noqa: E731
    want = torch.autograd.functional.hessian(lambda v: model(v).sum(), x)
    hessian = jax.jit(jax.hessian(scalar))(x.numpy())
    np.testing.assert_allclose(hessian, want, rtol=1e-3, atol=1e-5)
    pushed = jax.jit(lambda x, t: jax.jvp(lambda v: f(f.params, v), (x,), (t,))[1])
    jvp = pushed(x.numpy(), np.ones(6, np.float32))
    want = torch.autograd.functional.jvp(model, x, torch.ones(6))[1]
    np.testing.assert_allclose(jvp, want, rtol=1e-3, atol=1e-5)


def test_vmap_of_inputs_parameters_and_gradients():
    model, x = mlp(), data(5, 6)
    f = iso.jax_function(model)

    @jax.jit
    def run(params, stacked, x):
        per_example = jax.vmap(jax.grad(lambda p, v: f(p, v).sum()), (None, 0))(params, x)
        return jax.vmap(f, (None, 0))(params, x), jax.vmap(f, (0, None))(stacked, x), per_example

    stacked = {name: np.stack([array, 2 * np.asarray(array)]) for name, array in f.params.items()}
    rows, models, per_example = run(f.params, stacked, x.numpy())
    np.testing.assert_allclose(rows, model(x).detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(models[0], model(x).detach(), rtol=1e-4, atol=1e-5)
    assert models.shape == (2, 5, 4) and not np.allclose(models[0], models[1])
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
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda v: f(v).sum()))(x), [1, 1, 1])


def test_module_and_engine_are_whole_after_tracing_and_after_errors():
    model = mlp().to("jax")
    before = {name: id(p) for name, p in model.named_parameters()}
    f = iso.jax_function(model)
    jax.jit(f)(f.params, jnp.ones((2, 6)))

    def fails(v: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match="by the user"):
        jax.jit(iso.jax_function(fails))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"needs the value of a tensor while JAX traces it"):
        jax.jit(iso.jax_function(lambda v: v * v.sum().item()))(jnp.ones(2))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    model(data(2, 6).to("jax")).sum().backward()
    assert model[0].weight.grad.shape == (16, 6)
    assert "traced" not in repr(model[0].weight)


def test_marks_inside_become_constraints():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    f = iso.jax_function(lambda v: xs.mark_sharding(v * 2, mesh, ("x",)))
    assert jax.jit(f)(jnp.arange(8.0)).sharding.spec == P("x")


OPERATORS = {
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x[None], 2),
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros_like(x[:, 0]).long()),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}


def test_operators_are_differentiable_by_jax_as_by_torch():
    x = data(4, 4).requires_grad_()
    weigh = lambda y: (y * y.detach().cos()).sum()  # noqa: E731
    want = {n: torch.autograd.grad(weigh(of(x)), x)[0] for n, of in OPERATORS.items()}

    def loss(v: jax.Array, of: Any) -> jax.Array:
        y = iso.jax_function(of)(v)
        return (y * jnp.cos(jax.lax.stop_gradient(y))).sum()

    @jax.jit
    def gradients(v: jax.Array) -> Any:
        return {name: jax.grad(loss)(v, of) for name, of in OPERATORS.items()}

    for name, got in gradients(jnp.asarray(x.detach().numpy())).items():
        np.testing.assert_allclose(got, want[name], rtol=1e-4, atol=1e-5, err_msg=name)


class OwnNames(torch.nn.Module):
    """A module whose arguments have the names that `jax_function` uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x, rng=None, params=None, buffers=None):
        for other in (rng, params, buffers):
            x = x if other is None else x * other
        return x * self.one


def test_arguments_of_the_code_called_as_ours_reach_it_or_are_refused():
    f, x = iso.jax_function(OwnNames()), jnp.ones(())
    for call in (f, lambda own, *args, **kwargs: f.with_buffers({}, own, *args, **kwargs)[0]):
        assert call(f.params, x, params=5.0, buffers=3.0) == 15
        assert call(f.params, x, 5.0) == 5
        assert jax.jit(lambda rng, call=call: call(f.params, x, rng))(5.0) == 5
        with pytest.raises(TypeError, match=r"OwnNames has an argument `rng` of its own.*position"):
            call(f.params, x, rng=5.0)
    g = iso.jax_function(lambda x, params=1.0, rng=1.0: x * params * rng)
    assert g(x, params=5.0) == 5
    assert g(x, 1.0, 5.0) == 5
    with pytest.raises(TypeError, match="`rng` of its own"):
        g(x, rng=jax.random.key(0))
    other = iso.jax_function(torch.nn.Identity())
    assert other(params={}, input=x) == 1
    assert iso.jax_function(torch.sin)(x, rng=jax.random.key(0)) == jnp.sin(x)
