"""JAX's page on `shard_map`, block for block: collectives, and products of matrices from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, Words, alike, table

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
Blocks = Sequence[np.ndarray]


@pytest.fixture
def ring(request):
    """Four devices along an axis called r, set for the block."""
    mesh = jax.make_mesh((4,), ("r",), (request.param,))
    with jax.set_mesh(mesh):
        yield mesh


def _next(size: int, by: int = 1) -> list[tuple[int, int]]:
    return [(n, (n + by) % size) for n in range(size)]


COLLECTIVES: dict[str, tuple[Callable[..., Any], P, Callable[[Blocks], Any]]] = {
    "psum": (lambda x: lax.psum(x, "r"), P(), lambda blocks: sum(blocks)),
    "ppermute": (
        lambda x: lax.ppermute(x, "r", _next(4)),
        P("r"),
        lambda blocks: np.concatenate([blocks[n - 1] for n in range(4)]),
    ),
}


class TestCollectives:
    """Between a torch function before and one after."""

    @pytest.mark.parametrize(
        ("ring", "name"),
        [((EXPLICIT, AUTO)[number % 2], name) for number, name in enumerate(COLLECTIVES)],
        indirect=["ring"],
    )
    def test_one(self, ring, name):
        collective, spec, reference = COLLECTIVES[name]

        def block(by: Words) -> Any:
            before = by.function(lambda x: x * x - x, lambda x: x * x - x)
            after = by.function(lambda x: 2 * x, lambda x: 2 * x)

            @jax.shard_map(in_specs=P("r"), out_specs=spec)
            def program(x: jax.Array) -> jax.Array:
                return after(collective(before(x)))

            x = by.put(table(16), P("r"))
            return (program if name == "psum" else jax.jit(program))(x)  # one also step by step

        got = block(OURS)
        alike(got, block(JAX))
        blocks = np.split(np.asarray(table(16)), 4)
        want = 2 * np.asarray(reference([x * x - x for x in blocks]))
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("ring", [EXPLICIT], indirect=True)
    def test_a_gathered_value_is_not_known_to_be_the_same(self, ring):
        exp = iso.jax_function(torch.exp)
        program = jax.shard_map(
            lambda x: exp(lax.all_gather(x, "r", tiled=True)), in_specs=P("r"), out_specs=P()
        )
        with pytest.raises(ValueError, match="out_specs"):
            program(iso.shard(table(8), P("r")))


def gathered(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    return dot(left, lax.all_gather(right, "r", tiled=True))


def scattered_both_ways(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    size, here = lax.axis_size("r"), lax.axis_index("r")
    rows = jnp.stack(jnp.split(left, 2 * size))
    low, high = (
        dot(rows[2 * ((here - 1) % size)], right),
        dot(rows[2 * ((here + 1) % size) + 1], right),
    )
    for step in range(2, size + 1):
        low, high = (lax.ppermute(x, "r", _next(size, by)) for x, by in ((low, 1), (high, -1)))
        low += dot(rows[2 * ((here - step) % size)], right)
        high += dot(rows[2 * ((here + step) % size) + 1], right)
    return jnp.concatenate([low, high])


ROWS, COLUMNS = P("r", None), P(None, "r")
PRODUCTS = {gathered: ROWS, scattered_both_ways: COLUMNS}
"""How the left side lies; the right side and the result lie by rows."""


class TestProducts:
    """Products of matrices whose pieces torch multiplies."""

    @pytest.mark.parametrize(
        ("ring", "product"),
        [((AUTO, EXPLICIT)[number % 2], product) for number, product in enumerate(PRODUCTS)],
        indirect=["ring"],
        ids=lambda one: getattr(one, "__name__", None),
    )
    def test_one_and_what_it_sends(self, ring, product):
        counts = []

        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)
            program = jax.shard_map(
                partial(product, dot), in_specs=(PRODUCTS[product], ROWS), out_specs=ROWS
            )
            left = by.put(table(8, 8), PRODUCTS[product])
            right = by.put(table(8, 3, first=5), ROWS)
            compiled = jax.jit(program).lower(left, right).compile()
            names = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
            counts.append([compiled.as_text().count(f" {name}(") for name in names])
            return compiled(left, right)

        got = block(OURS)
        alike(got, block(JAX))
        np.testing.assert_array_equal(got, table(8, 8) @ table(8, 3, first=5))
        assert counts[0] == counts[1] and sum(counts[0]) > 0

    @pytest.mark.parametrize(
        ("ring", "product"),
        [(EXPLICIT, gathered), (AUTO, scattered_both_ways)],
        indirect=["ring"],
        ids=["gathered", "scattered"],
    )
    def test_its_gradient(self, ring, product):
        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)
            program = jax.shard_map(
                partial(product, dot), in_specs=(PRODUCTS[product], ROWS), out_specs=ROWS
            )
            loss = lambda left, right: (program(left, right) ** 2).sum()  # noqa: E731
            left = by.put(table(8, 8), PRODUCTS[product])
            return jax.jit(jax.grad(loss, (0, 1)))(left, by.put(table(8, 3, first=5), ROWS))

        alike(block(OURS), block(JAX))
