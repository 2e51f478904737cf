"""`jax_function` in full: buffers, keys, transformations of JAX; in float64, against CPU torch."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_faults import erf_in_shard_map

functional = torch.nn.functional


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 4),
    )


def transformer(dropout: float = 0.0) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return torch.nn.Sequential(layer, torch.nn.Linear(8, 4))


MODELS = {
    "mlp": (mlp, (5, 6)),
    "cnn": (cnn, (5, 2, 6, 6)),
    "transformer": (transformer, (5, 3, 8)),
    "lstm": (Recurrent, (4, 5, 3)),
}


def built(build: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return build().double()


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


def close(got: Any, want: torch.Tensor, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_mode_in_float64_with_new_buffers(x64, name, remat):
    build, shape = MODELS[name]
    model, x = built(build), data(*shape)
    f = iso.jax_function(copy.deepcopy(model))
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
    f, batches = iso.jax_function(copy.deepcopy(model)), data(4, 6, 3)

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


@pytest.mark.parametrize("device", ["cpu", "jax", "meta"])
def test_modules_on_every_device(device):
    model = cnn()
    values = iso.jax_function(model).params
    f = iso.jax_function(copy.deepcopy(model).to(device))
    assert f.shapes == jax.eval_shape(lambda: values)
    x = torch.randn(2, 2, 6, 6)
    out, _ = jax.jit(f.with_buffers)(
        {n: values[n] for n, _ in model.named_parameters()},
        {n: values[n] for n, _ in model.named_buffers()},
        x.numpy(),
    )
    close(out, model(x), 1e-4)
    if device == "meta":
        with pytest.raises(
            ValueError, match=r"meta device, so 0.weight, .* have no values.*shapes"
        ):
            _ = f.params


def test_tied_parameters_stay_tied(x64):
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, index = built(tied), torch.tensor([0, 3])
    f = iso.jax_function(copy.deepcopy(model))
    assert list(f.params) == ["0.weight"]
    got = jax.jit(jax.grad(lambda p, i: (f(p, i) ** 2).sum()))(f.params, index.numpy())
    model(index).square().sum().backward()
    close(got["0.weight"], model[0].weight.grad)


def test_training_mode_is_read_at_the_call():
    model = torch.nn.BatchNorm1d(2)
    f, x = iso.jax_function(model), jnp.array([[0.0, 2.0], [2.0, 4.0]])
    training = f(f.params, x)
    model.eval()
    np.testing.assert_allclose(f(f.params, x), x, atol=1e-4)
    model.train()
    np.testing.assert_allclose(f(f.params, x), training)


def test_masks_of_dropout_follow_the_key(x64):
    model = built(lambda: transformer(dropout=0.25))
    f, x = iso.jax_function(model), data(5, 3, 8).numpy()
    run = jax.jit(lambda key: f(f.params, x, rng=key))
    first, again, other = (run(jax.random.key(n)) for n in (0, 0, 1))
    assert jnp.array_equal(first, again) and not jnp.array_equal(first, other)
    np.testing.assert_allclose(f(f.params, x, rng=jax.random.key(0)), first, rtol=1e-9)
    raw = jax.jit(lambda: f(f.params, x, rng=jax.random.PRNGKey(0)))()
    np.testing.assert_allclose(raw, first, rtol=1e-9)
    with pytest.raises(RuntimeError, match=r"draws random numbers.*rng=jax\.random\.key"):
        f(f.params, x)
    # The mean over masks is near the value without them, for a layer linear in its input.
    drop = iso.jax_function(torch.nn.Dropout(0.25))
    masks = jax.vmap(lambda key: drop({}, jnp.ones(50), rng=key))(
        jax.random.split(jax.random.key(2), 400)
    )
    assert abs(float(jnp.mean(masks == 0)) - 0.25) < 0.01
    assert abs(float(jnp.mean(masks)) - 1) < 0.015
    gradient = jax.grad(lambda v: drop({}, v, rng=jax.random.key(0)).sum())(jnp.ones(50))
    np.testing.assert_array_equal(gradient, drop({}, jnp.ones(50), rng=jax.random.key(0)))


def test_keys_under_vmap_and_scan():
    f, x = iso.jax_function(torch.nn.Dropout(0.5)), jnp.ones((3, 64))
    key = jax.random.key(0)
    same = jax.vmap(lambda v: f({}, v, rng=key))(x)
    alone = f({}, x[0], rng=key)
    assert jnp.array_equal(same[0], same[2]) and jnp.array_equal(same[0], alone)
    keys = jax.random.split(key, 3)
    split = jax.vmap(lambda v, k: f({}, v, rng=k))(x, keys)
    assert not jnp.array_equal(split[0], split[1])
    scanned = jax.lax.scan(lambda c, k: (c, f({}, x[0], rng=k)), 0, keys)[1]
    np.testing.assert_array_equal(scanned, split)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=erf_in_shard_map if name == "mlp" else ()) for name in MODELS],
)
def test_under_shard_map_and_its_gradient(x64, mesh, name):
    build, shape = MODELS[name]
    model = built(build).eval()
    f, x = iso.jax_function(copy.deepcopy(model)), data(8, *shape[1:])

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
    model, x = built(mlp), data(3, 5, 6)
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
