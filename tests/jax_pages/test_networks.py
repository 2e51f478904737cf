"""Networks on many devices, as the pages on automatic and manual partitioning train them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.jax_pages.blocks import JAX, OURS, Words, alike
from tests.jax_pages.networks import bent, loss, numbers

AUTO = AxisType.Auto


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Explicit):
    return jax.set_mesh(jax.make_mesh(sizes, names, (kind,) * len(sizes)))


def _close(got: Any, want: Any) -> None:
    """Numbers that were added in another order."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def _on_one_device() -> Any:
    return jax.jit(jax.value_and_grad(partial(loss, JAX)))(*numbers())


class TestPartitionedByTheCompiler:
    """Auto axes: layouts are given to parameters and batch, and nothing else is said."""

    def test_it(self):
        of_weights = [P(), P(None, "f"), P("f", None)]

        def block(by: Words) -> Any:
            params, batch = numbers()
            batch = tuple(by.put(one, P("b", None)) for one in batch)
            params = [
                (by.put(w, spec), by.put(b, P(*spec[1:])))
                for (w, b), spec in zip(params, of_weights, strict=True)
            ]

            @jax.jit
            def step(params: Any, batch: Any) -> Any:
                value, gradient = jax.value_and_grad(partial(loss, by))(params, batch)
                return value, jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

            losses = []
            for _ in range(3):
                value, params = step(params, batch)
                losses.append(value)
            assert losses[-1] < losses[0]
            return losses, params

        with _mesh((4, 2), ("b", "f"), AUTO):
            alike(block(OURS), block(JAX))


def _unless_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return str(primitive) != "all_gather"


class TestBoth:
    """Parameters are split over both axes, and gathered along one."""

    def _loss(self, by: Words) -> Any:
        dot, activation = by.function(jnp.dot, torch.matmul), bent(by)
        errors = by.function(
            lambda got, want: jnp.square(got - want).sum(-1),
            lambda got, want: (got - want).square().sum(-1),
        )
        whole = partial(lax.all_gather, axis_name="b", tiled=True)

        @partial(jax.remat, policy=_unless_gathered)
        def forward(params: Any, x: jax.Array) -> jax.Array:
            for number, (w, b) in enumerate(params):
                x = activation(x) if number else x
                product = dot(x, whole(w))
                x = lax.psum_scatter(product, "f", scatter_dimension=1, tiled=True) + whole(b)
            return x

        @jax.shard_map(in_specs=(P(("f", "b")), P("b", "f")), out_specs=P())
        def program(params: Any, batch: Any) -> jax.Array:
            x, want = batch
            return lax.pmean(lax.psum(errors(forward(params, x), want), "f").mean(), "b")

        return program

    def test_it(self):
        def block(by: Words) -> Any:
            params, batch = numbers()
            params, batch = by.put(params, P(("f", "b"))), by.put(batch, P("b", "f"))
            return jax.jit(jax.value_and_grad(self._loss(by)))(params, batch)

        with _mesh((4, 2), ("b", "f")):
            got = block(OURS)
            alike(got, block(JAX))
        _close(got, _on_one_device())
