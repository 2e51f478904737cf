"""Programs that bring their derivatives give those of the same function in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.runtime import differentiable_calls
from isoshard.core.runtime.shard_map_axes import checked_axes, vary_equally, varying

X = jnp.arange(4.0) / 3 + 0.2
W = jnp.arange(4.0) + 1


class Plain:
    """A function as a program, whose derivative is counted."""

    counted = 0

    def __init__(self, function, count, results):
        self.function, self.count, self.results = function, count, results

    def __call__(self, *operands):
        return list(self.function(*operands))

    def linear(self, which):
        return PlainDerivative(self, which)

    def spread(self, number, tangent):
        return tangent


class PlainDerivative:
    def __init__(self, program, which):
        self.program, self.which = program, which
        self.count, self.with_cotangent = program.count, range(program.results)

    def forward(self, *operands):
        return self.program(*operands), [jnp.cos(operands[0])]

    def backward(self, operands, residuals, slopes):
        Plain.counted += 1
        _, pull = jax.vjp(lambda *given: self.program(*given), *operands)
        found = pull(list(slopes))
        return [found[number] for number in self.which]

    @property
    def vjp(self):
        def pull(*given):
            return self.backward(given[: self.count], None, given[self.count :])

        return Plain(pull, self.count + len(self.with_cotangent), len(self.which))


def plain(x, w):
    return jnp.sin(x) * w**2


PROGRAM = Plain(lambda x, w: [plain(x, w)], 2, 1)


def called(x, w):
    return differentiable_calls.call(PROGRAM, x, w)[0]


def summed(f):
    return lambda *given: f(*given).sum()


def twice(f, argnums=(0, 1)):
    return f(summed(f), argnums=argnums)


WAYS = {
    "jit": lambda f: jax.jit(f)(X, W),
    "jvp": lambda f: jax.jvp(f, (X, W), (W, X)),
    "jit of jvp": lambda f: jax.jit(lambda x, w: jax.jvp(f, (x, w), (w, x)))(X, W),
    "grad": lambda f: jax.grad(summed(f), argnums=(0, 1))(X, W),
    "jit of grad": lambda f: jax.jit(jax.grad(summed(f)))(X, W),
    "grad of jit": lambda f: jax.grad(jax.jit(summed(f)))(X, W),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f, argnums=(0, 1)), in_axes=(0, None))(X, W[3]),
    "grad of vmap": lambda f: jax.grad(
        lambda x, v: jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))(x, v).sum(),
        argnums=(0, 1),
    )(X, W),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(summed(f)), argnums=1)(X, W),
    "forward over reverse": lambda f: jax.hessian(summed(f), argnums=(0, 1))(X, W),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(summed(f)), argnums=1)(X, W),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(summed(f)))(X, W),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(summed(f))))(X, W),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(c, W), None), x, None, length=2)[0].sum()
    )(X),
    "transposed pullback": lambda f: jax.linear_transpose(
        lambda ct: jax.vjp(lambda x: f(x, W), X)[1](ct)[0], X
    )(W),
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_the_function(way):
    before = Plain.counted
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        WAYS[way](called),
        WAYS[way](plain),
    )
    assert Plain.counted > before or way in ("jit",)


def test_a_backward_that_is_not_linear_has_no_forward_mode():
    class Clipping(PlainDerivative):
        def backward(self, operands, residuals, slopes):
            return [jnp.clip(slopes[0], -1, 1)]

    program = Plain(lambda x: [x * 2], 1, 1)
    program.linear = lambda which: Clipping(program, which)
    clipped = lambda x: differentiable_calls.call(program, x)[0]  # noqa: E731
    assert jax.vjp(clipped, X)[1](5 * jnp.ones(4))[0].tolist() == [1] * 4
    with pytest.raises(NotImplementedError, match="not linear in the gradient"):
        jax.jvp(clipped, (X,), (X,))


def test_inside_shard_map():
    mesh = iso.make_mesh((2, 4), ("a", "b"))

    def loss(f):
        def local(x, w):
            assert checked_axes() == {"a", "b"} and varying(x) == {"a"} and not varying(w)
            x, w = vary_equally((x, w))
            assert varying(w) == {"a"}
            return jax.lax.psum(f(x, w).sum(), "a")

        return jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())

    given = jnp.arange(4.0) + 0.5, jnp.float32(3)
    found, want = (jax.jit(jax.grad(loss(f), argnums=(0, 1)))(*given) for f in (called, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, want)
