"""What torch code may read while JAX traces it, and derivatives of what is computed twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso

X = np.array([0.5, -2.0, 3.0])


@pytest.fixture(autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


def test_the_value_beside_a_gradient_has_torchs_derivative():
    f = iso.jax_function(lambda x: (x * x.detach()).sum())

    def value(x):
        return jax.value_and_grad(f)(x)[0]

    def both(x):
        return jax.grad(value)(x), jax.grad(jax.jit(jax.checkpoint(value)))(x)

    for found in jax.jit(both)(X):
        np.testing.assert_array_equal(found, X)
    rows = jnp.stack([X, 2 * X])
    mapped = jax.grad(lambda rows: jax.vmap(value)(rows).sum())
    np.testing.assert_array_equal(jax.jit(mapped)(rows), rows)


def test_operations_without_a_derivative_in_jax_are_differentiated_twice():
    def f(x):
        return torch.nextafter(x * x, x).sum()  # JAX has no derivative of it, torch has

    def gradient(x):
        return jax.grad(iso.jax_function(f))(x).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(gradient))(X), [2.0, 2.0, 2.0])


def test_cotangents_may_be_constants_of_numpy():
    index = torch.tensor([1])
    f = iso.jax_function(lambda x: x.index_fill(0, index, 0.0))
    ones = np.ones(3)

    def pulled(x, cotangent):
        return jax.vjp(f, x)[1](cotangent)[0]

    found = jax.jit(lambda x: jax.vjp(pulled, x, ones)[1](ones))(X)
    np.testing.assert_array_equal(found[1], [1.0, 0.0, 1.0])


def test_what_depends_on_no_argument_is_known():
    mask, count = torch.tensor([True, False, True]), torch.tensor(2)

    def f(x):
        few = torch.arange(3, device=x.device).sum() > 1  # a branch on what is computed inside
        y = torch.masked_select(x, mask) if few else x
        return y.narrow(0, 0, count) * torch.full((3,), 2.0, device=x.device).sum().item()

    g = iso.jax_function(f)
    np.testing.assert_array_equal(jax.jit(g)(X), [3.0, 18.0])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: g(x).sum()))(X), [6.0, 0.0, 6.0])


def test_what_depends_on_an_argument_or_a_key_is_refused():
    for code in (lambda x: x * x.sum().item(), lambda x: x * torch.rand_like(x[:1]).item()):
        with pytest.raises(TypeError, match="needs the value of a tensor while JAX traces it"):
            jax.jit(iso.jax_function(code))(X, rng=jax.random.key(0))


def test_a_tensor_read_in_a_trace_outlives_it():
    count = torch.tensor([2]).to("jax")
    jax.jit(iso.jax_function(lambda x: x.repeat_interleave(count)))(X[:1])
    assert (count + 1).tolist() == [3]


@pytest.mark.parametrize("name", ["svd", "eig", "eigh"])
def test_gradients_of_complex_decompositions(name):
    """Torch asks there whether the loss depends on phases, of which a trace has no values."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 3)) + 1j * rng.normal(size=(3, 3))

    def loss(x):
        x = x + x.mH if name == "eigh" else x
        found = getattr(torch.linalg, name)(x)
        return sum((one.abs() ** 2 * (1 + torch.arange(one.shape[-1]))).sum() for one in found)

    x = torch.tensor(a, requires_grad=True)
    loss(x).backward()
    found = jax.jit(jax.grad(iso.jax_function(loss)))(a)
    np.testing.assert_allclose(found, x.grad.conj().resolve_conj(), atol=1e-10)


def test_real_numbers_in_a_complex_diagonal_have_real_gradients():
    def loss(x, d):
        return (torch.diagonal_scatter(x, d) * (2 + 1j)).abs().sum()

    given = torch.ones(2, 2, dtype=torch.complex128), torch.tensor([3.0, -4.0], dtype=torch.float64)
    a, b = (one.to("jax").requires_grad_() for one in given)
    found = torch.autograd.grad(loss(a, b), (a, b))
    np.testing.assert_allclose(found[1].cpu(), [5**0.5, -(5**0.5)])
    assert found[0].cpu().tolist()[0][0] == 0


@torch.library.custom_op("test_values::halves", mutates_args=())
def halves(x: torch.Tensor, factor: float) -> list[torch.Tensor]:
    return [torch.tensor(one.copy()) for one in np.split(x.cpu().numpy() * factor, 2)]


@halves.register_fake
def _(x, factor):
    return [x.new_empty(x.shape[0] // 2, *x.shape[1:]) for _ in range(2)]


halves.register_autograd(
    lambda ctx, slopes: (torch.cat([3 * one for one in slopes]), None),
    setup_context=lambda ctx, inputs, output: None,
)


def test_kernels_of_numpy_are_called_by_the_program():
    f = iso.jax_function(lambda x: torch.stack(halves(x, 3.0)))
    x = np.arange(4.0)
    np.testing.assert_array_equal(jax.jit(f)(x), [[0, 3], [6, 9]])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x)[1].sum()))(x), [0, 0, 3, 3])
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(np.stack([x, -x]))[1], [[0, -3], [-6, -9]])
