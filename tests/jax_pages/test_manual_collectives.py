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


@pytest.fixture(params=[EXPLICIT, AUTO], ids=["explicit", "auto"])
def ring(request):
    """Four devices along an axis called r, set for the block."""
    mesh = jax.make_mesh((4,), ("r",), (request.param,))
    with jax.set_mesh(mesh):
        yield mesh


def _next(size: int, by: int = 1) -> list[tuple[int, int]]:
    return [(n, (n + by) % size) for n in range(size)]


def scattered_sum(x: jax.Array) -> jax.Array:
    """A sum of which each device gets its part, sent around the ring step by step."""
    size, here = lax.axis_size("r"), lax.axis_index("r")
    parts = x.reshape(size, -1, *x.shape[1:])
    part = partial(lax.dynamic_index_in_dim, parts, keepdims=False)
    found = part((here - 1) % size)
    for step in range(2, size + 1):
        found = lax.ppermute(found, "r", _next(size)) + part((here - step) % size)
    return found


def _rows(blocks: Blocks) -> np.ndarray:
    return np.array(blocks).reshape(4, 4, -1)


COLLECTIVES: dict[str, tuple[Callable[..., Any], P, Callable[[Blocks], Any]]] = {
    "psum": (lambda x: lax.psum(x, "r"), P(), lambda blocks: sum(blocks)),
    "all_gather, tiled": (
        lambda x: lax.all_gather(x, "r", tiled=True),
        P("r"),
        lambda blocks: np.concatenate([np.concatenate(blocks)] * 4),
    ),
    "all_gather, stacked": (
        lambda x: lax.all_gather(x, "r"),
        P("r"),
        lambda blocks: np.concatenate([np.stack(blocks)] * 4),
    ),
    "psum_scatter, tiled": (
        lambda x: lax.psum_scatter(x, "r", tiled=True),
        P("r"),
        lambda blocks: sum(blocks),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "r")[None],
        P("r"),
        lambda blocks: sum(blocks),
    ),
    "psum_scatter of steps": (scattered_sum, P("r"), lambda blocks: sum(blocks)),
    "ppermute": (
        lambda x: lax.ppermute(x, "r", _next(4)),
        P("r"),
        lambda blocks: np.concatenate([blocks[n - 1] for n in range(4)]),
    ),
    "ppermute to some": (
        lambda x: lax.ppermute(x, "r", [(0, 2), (2, 1)]),
        P("r"),
        lambda blocks: np.concatenate([0 * blocks[0], blocks[2], blocks[0], 0 * blocks[3]]),
    ),
    "all_to_all, tiled": (
        lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True),
        P("r"),
        lambda blocks: _rows(blocks).swapaxes(0, 1).reshape(16),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "r", 0, 0),
        P("r"),
        lambda blocks: _rows(blocks).swapaxes(0, 1).reshape(16),
    ),
}


class TestCollectives:
    """Between a torch function before and one after."""

    @pytest.mark.parametrize("name", COLLECTIVES)
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

    @pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
    @pytest.mark.parametrize(
        ("names", "spec"), [("p", P(None, "q")), ("q", P("p", None)), (("p", "q"), P(None, None))]
    )
    def test_sums_over_one_axis_of_two_or_both(self, names, spec, kind):
        with jax.set_mesh(jax.make_mesh((2, 2), ("p", "q"), (kind, kind))):

            def block(by: Words) -> Any:
                square = by.function(jnp.square, torch.square)

                @jax.shard_map(in_specs=P("p", "q"), out_specs=spec)
                def program(x: jax.Array) -> jax.Array:
                    return lax.psum(square(x), names)

                return program(by.put(table(4, 4), P("p", "q")))

            alike(block(OURS), block(JAX))
            whole = np.asarray(table(4, 4)).reshape(2, 2, 2, 2) ** 2
            axes = tuple({"p": 0, "q": 2}[name] for name in np.atleast_1d(names))
            want = whole.sum(axes)
            np.testing.assert_array_equal(np.asarray(block(OURS)).ravel(), want.ravel())

    def test_a_gathered_value_is_not_known_to_be_the_same(self, ring):
        exp = iso.jax_function(torch.exp)
        program = jax.shard_map(
            lambda x: exp(lax.all_gather(x, "r", tiled=True)), in_specs=P("r"), out_specs=P()
        )
        with pytest.raises(ValueError, match="out_specs"):
            program(iso.shard(table(8), P("r")))


def gathered(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    return dot(left, lax.all_gather(right, "r", tiled=True))


def gathered_in_steps(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """A piece of the right side is multiplied while the next one is on its way."""
    size, here = lax.axis_size("r"), lax.axis_index("r")
    columns = jnp.stack(jnp.split(left, size, axis=1))
    total = jnp.zeros_like(dot(columns[0], right))
    for step in range(size):
        total += dot(columns[(here - step) % size], right)
        right = lax.ppermute(right, "r", _next(size))
    return total


def gathered_both_ways(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """Halves of the pieces go around the ring in both directions."""
    size, here = lax.axis_size("r"), lax.axis_index("r")
    columns = jnp.stack(jnp.split(left, 2 * size, axis=1))
    low, high = jnp.split(right, 2)
    total = jnp.zeros_like(dot(columns[0], low))
    for step in range(size):
        both = [columns[2 * ((here - step) % size)], columns[2 * ((here + step) % size) + 1]]
        total += dot(jnp.concatenate(both, 1), jnp.concatenate([low, high]))
        low, high = (lax.ppermute(x, "r", _next(size, by)) for x, by in ((low, 1), (high, -1)))
    return total


def scattered(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    return lax.psum_scatter(dot(left, right), "r", tiled=True)


def scattered_in_steps(dot: Any, left: jax.Array, right: jax.Array) -> jax.Array:
    """A part of the result travels, and takes up what each device has for it."""
    size, here = lax.axis_size("r"), lax.axis_index("r")
    rows = jnp.stack(jnp.split(left, size))
    total = dot(rows[(here - 1) % size], right)
    for step in range(2, size + 1):
        total = lax.ppermute(total, "r", _next(size)) + dot(rows[(here - step) % size], right)
    return total


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
PRODUCTS = {
    gathered: ROWS,
    gathered_in_steps: ROWS,
    gathered_both_ways: ROWS,
    scattered: COLUMNS,
    scattered_in_steps: COLUMNS,
    scattered_both_ways: COLUMNS,
}
"""How the left side lies; the right side and the result lie by rows."""


class TestProducts:
    """Products of matrices whose pieces torch multiplies."""

    @pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
    def test_one(self, ring, product):
        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)
            program = jax.shard_map(
                partial(product, dot), in_specs=(PRODUCTS[product], ROWS), out_specs=ROWS
            )
            left = by.put(table(8, 8), PRODUCTS[product])
            right = by.put(table(8, 3, first=5), ROWS)
            return jax.jit(program)(left, right)

        alike(block(OURS), block(JAX))
        np.testing.assert_array_equal(block(OURS), table(8, 8) @ table(8, 3, first=5))

    @pytest.mark.parametrize("product", [gathered, scattered_in_steps], ids=lambda p: p.__name__)
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

    @pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
    def test_it_communicates_as_in_jax(self, ring, product):
        counts = []
        for by in (JAX, OURS):
            program = jax.shard_map(
                partial(product, by.function(jnp.dot, torch.matmul)),
                in_specs=(PRODUCTS[product], ROWS),
                out_specs=ROWS,
            )
            given = by.put(table(8, 8), PRODUCTS[product]), by.put(table(8, 3), ROWS)
            text = jax.jit(program).lower(*given).compile().as_text()
            names = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
            counts.append({name: text.count(f" {name}(") for name in names})
        assert counts[0] == counts[1] and sum(counts[0].values()) > 0
