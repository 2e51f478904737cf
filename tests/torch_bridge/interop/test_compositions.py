"""torch -> JAX -> torch and JAX -> torch -> JAX: gradients of one framework, one program."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import isoshard as iso
import isoshard.torch_bridge as xs

functional = torch.nn.functional


@pytest.fixture
def programs():
    """The programs that XLA compiles from here on."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Head(nnx.Module):
    """What `Twin` is in torch."""

    def __init__(self):
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, momentum=0.9, epsilon=1e-5, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.norm(self.dense(x)))


class Twin(torch.nn.Module):
    def __init__(self, head: Head):
        super().__init__()
        self.dense, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        with torch.no_grad():
            self.dense.weight.copy_(torch.tensor(np.asarray(head.dense.kernel[...]).T))
            self.dense.bias.copy_(torch.tensor(np.asarray(head.dense.bias[...])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.dense(x)))


class Model(torch.nn.Module):
    """torch, then JAX, then torch, then a JAX function, then torch."""

    def __init__(self, head: torch.nn.Module, softmax: Any):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
        self.head, self.decoder = head, torch.nn.Linear(8, 3)
        self.softmax = softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.decoder(self.head(self.encoder(x)))).square().sum()


def pair() -> tuple[Model, Model]:
    head = Head()
    ours = Model(iso.torch_module(head), iso.torch_function(jax.nn.softmax))
    return ours.to("jax"), Model(Twin(head), lambda x: torch.softmax(x, -1))


NAMES = {"head.dense.kernel": "head.dense.weight", "head.norm.scale": "head.norm.weight"}


def assert_same_gradients(ours: Model, reference: Model) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in ours.named_parameters():
        want = wanted[NAMES.get(name, name)].grad
        want = want.T if name == "head.dense.kernel" else want
        torch.testing.assert_close(parameter.grad.cpu(), want, rtol=1e-5, atol=1e-6, msg=name)


def test_torch_jax_torch_is_one_program(counted, programs):
    ours, reference = pair()
    x = data(6, 4)
    lazy = x.to("jax").requires_grad_()
    programs.clear()
    loss = ours(lazy)
    loss.backward()
    xs.sync()
    assert counted("executions") == 1 and len(programs) == 1
    leaf = x.clone().requires_grad_()
    want = reference(leaf)
    want.backward()
    torch.testing.assert_close(loss.cpu(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lazy.grad.cpu(), leaf.grad, rtol=1e-5, atol=1e-6)
    assert_same_gradients(ours, reference)


def test_torch_jax_torch_in_a_compiled_step(counted, programs):
    ours, reference = pair()

    def make(model: Model) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss

        return step

    step, plain = xs.compile(make(ours)), make(reference)
    batches = [data(6, 4, seed=seed) for seed in range(3)]
    for batch in batches:
        before, compiled = counted("executions"), len(programs)
        got = step(batch.to("jax"))
        xs.sync()
        executions, compiled = counted("executions") - before, len(programs) - compiled
        torch.testing.assert_close(got.cpu(), plain(batch), rtol=1e-5, atol=1e-5)
    assert (executions, compiled) == (1, 0)  # the last step: one program, compiled before
    torch.testing.assert_close(
        ours.head.get_buffer("norm.mean").cpu(),
        reference.head.norm.running_mean,
        rtol=1e-4,
        atol=1e-5,
    )


def test_jax_torch_jax_is_one_program(counted, programs):
    torch.manual_seed(0)
    middle = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.SiLU())
    reference = copy.deepcopy(middle)
    f = iso.jax_function(middle)
    w, v = data(4, 8, seed=1), data(8, 3, seed=2)
    traced = []

    @jax.jit
    def step(params, buffers, w, v, x):
        traced.append(1)

        def loss(params, w, v):
            h, new = f.with_buffers(params, buffers, jnp.sin(x @ w))
            return (jax.nn.softmax(h @ v) ** 2).sum(), new

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, w, v)

    params, buffers = f.parameters, f.buffers
    arrays = [t.numpy() for t in (w, v)]
    batches = [data(6, 4, seed=seed).numpy() for seed in (3, 4)]
    programs.clear()
    for batch in batches:
        (value, buffers), (gradients, of_w, of_v) = step(params, buffers, *arrays, batch)
    assert len(traced) == 1 and len(programs) == 1
    assert counted("executions") == 0 and counted("compilations") == 0  # nothing beside it
    for batch in batches:
        a, b = (t.clone().requires_grad_() for t in (w, v))
        reference.zero_grad()
        h = reference(torch.sin(torch.from_numpy(batch) @ a))
        want = torch.softmax(h @ b, -1).square().sum()
        want.backward()
    close = lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)  # noqa: E731
    close(value, want.detach())
    close(of_w, a.grad)
    close(of_v, b.grad)
    for name, parameter in reference.named_parameters():
        close(gradients[name], parameter.grad)
    for name, buffer in reference.named_buffers():
        close(buffers[name], buffer)


def test_jax_torch_jax_torch_nested():
    """A Flax head inside a torch model, inside JAX: the parameters come in from outermost."""
    ours, reference = pair()
    x = data(6, 4)
    f = iso.jax_function(ours)
    step = jax.jit(jax.value_and_grad(lambda p, b: f.with_buffers(p, b, x.numpy()), has_aux=True))
    (value, buffers), gradients = step(f.parameters, f.buffers)
    want = reference(x)
    want.backward()
    np.testing.assert_allclose(value, want.detach(), rtol=1e-5)
    got = gradients["head.dense.kernel"].T
    np.testing.assert_allclose(got, reference.head.dense.weight.grad, rtol=1e-5, atol=1e-6)
    mean = reference.head.norm.running_mean
    np.testing.assert_allclose(buffers["head.norm.mean"], mean, rtol=1e-4, atol=1e-6)
    assert ours.head.get_buffer("norm.mean").abs().sum() == 0  # nothing leaked into the module
