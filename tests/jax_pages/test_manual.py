"""JAX's page on `shard_map`, block for block: maps, specs, and types along Manual axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, Function, Words, alike, table

AUTO = AxisType.Auto


@contextmanager
def over(*sizes: int, kind: AxisType = AxisType.Explicit) -> Iterator[Any]:
    """A mesh of the first devices, set for a block; its axes are called p and q."""
    mesh = jax.make_mesh(sizes, ("p", "q")[: len(sizes)], (kind,) * len(sizes))
    with jax.set_mesh(mesh):
        yield mesh


def _types(*arrays: Any) -> list[str]:
    return [str(jax.typeof(one)) for one in arrays]


class TestAFirstMap:
    """A product of matrices in blocks."""

    def _laid_out(self, by: Words) -> tuple[jax.Array, jax.Array]:
        return by.put(table(8, 6), P("p", "q")), by.put(table(6, 4, first=2), P("q", None))

    def _product(self, by: Words) -> Function:
        dot = by.function(jnp.dot, torch.matmul)

        @jax.shard_map(in_specs=(P("p", "q"), P("q", None)), out_specs=P("p", None))
        def product(left: jax.Array, right: jax.Array) -> jax.Array:
            assert (left.shape, right.shape) == ((2, 3), (3, 4))
            return jax.lax.psum(dot(left, right), "q")

        return product

    @pytest.mark.parametrize(
        ("kind", "how"), [(AxisType.Explicit, lambda f: f), (AUTO, jax.jit)], ids=["eager", "jit"]
    )
    def test_it(self, kind, how):
        with over(4, 2, kind=kind):
            got, want = (how(self._product(by))(*self._laid_out(by)) for by in (OURS, JAX))
        alike(got, want)
        np.testing.assert_array_equal(got, table(8, 6) @ table(6, 4, first=2))


class TestSpecs:
    """How inputs are cut and results are put together."""

    def test_an_input_that_names_fewer_axes(self):
        seen: list[tuple[int, ...]] = []

        def block(by: Words) -> Any:
            negative = by.function(jnp.negative, torch.neg)

            @jax.shard_map(in_specs=P(None, "q"), out_specs=P("p", "q"))
            def program(x: jax.Array) -> jax.Array:
                seen.append(x.shape)
                return negative(x)

            return jax.jit(program)(by.put(table(12, 12), P(None, "q")))

        with over(4, 2):
            got = block(OURS)
            alike(got, block(JAX))
        assert got.shape == (48, 12)
        assert set(seen) == {(12, 6)}

    def test_what_the_body_takes_from_around_it(self):
        with over(4, 2, kind=AUTO):

            def block(by: Words) -> Any:
                x = jnp.array([[2.5]])
                double = by.function(lambda x: x + x, lambda x: x + x)
                return jax.shard_map(lambda: double(x), in_specs=(), out_specs=P("p", None))()

            alike(block(OURS), block(JAX))

    def test_specs_are_found_in_types(self):
        with over(4, 2):

            def block(by: Words) -> Any:
                total = by.function(lambda x: x.sum(1), lambda x: x.sum(1))
                program = jax.shard_map(lambda x: jax.lax.psum(total(x), "q"), out_specs=P("p"))
                return jax.jit(program)(by.put(table(8, 4), P("p", "q")))

            alike(block(OURS), block(JAX))

    def test_some_axes_alone(self):
        seen: dict[Words, list[str]] = {}
        with over(4, 2):

            def block(by: Words) -> Any:
                times = by.function(lambda x: x * 3, lambda x: x * 3)
                if by is OURS:  # only part of the mesh is Manual: the rest of the type is said
                    times = iso.jax_function(lambda x: x * 3, out_sharding=P(None, "q"))

                @jax.shard_map(out_specs=P("p", None), in_specs=P("p", None), axis_names={"p"})
                def program(x: jax.Array) -> jax.Array:
                    y = times(x)
                    seen[by] = _types(x, y)
                    return jax.lax.ppermute(y, "p", [(n, (n + 1) % 4) for n in range(4)])

                x = by.put(table(8, 4), P("p", "q"))
                if by is OURS:  # where JAX's own auto_axes fails as well
                    with pytest.raises(iso.ShardingError, match=r"over 'p'.*under jax\.jit"):
                        program(x)
                return jax.jit(program)(x)

            alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX]
        assert seen[JAX][0] == "float32[2,4@q]{V:p}"

    def test_some_axes_alone_and_a_result_of_which_nothing_is_said(self):
        with over(4, 2):
            x = iso.shard(table(8, 4), P("p", "q"))
            program = jax.shard_map(
                iso.jax_function(torch.exp), in_specs=P("p"), out_specs=P("p"), axis_names={"p"}
            )
            with pytest.raises(iso.ShardingError, match=r"exp .* over \['p'\].*out_sharding=P\("):
                jax.jit(program)(x)


class TestValuesThatVary:
    """What differs from device to device is part of a type along Manual axes."""

    def test_a_sum_is_everywhere_the_same(self):
        seen: dict[Words, list[str]] = {}
        with over(4, 2):

            def block(by: Words) -> Any:
                cube = by.function(lambda x: x**3, lambda x: x**3)

                @jax.shard_map(in_specs=P("p", "q"), out_specs=P("p"))
                def program(x: jax.Array) -> jax.Array:
                    y = cube(x)
                    z = cube(jax.lax.psum(y, "q"))
                    assert jax.typeof(z).manual_axis_type.varying == {"p"}
                    seen[by] = _types(x, y, z)
                    return z

                return jax.jit(program)(by.put(table(8, 4), P("p", "q")))

            alike(block(OURS), block(JAX))
        want = ["float32[2,2]{V:(p,q)}"] * 2 + ["float32[2,2]{V:p}"]
        assert seen[OURS] == seen[JAX] == want

    def test_a_result_that_promises_too_much(self):
        with over(2):
            x = iso.shard(table(6), P("p"))
            for same in (lambda x: x, iso.jax_function(lambda x: x + 0)):
                with pytest.raises(ValueError, match=r"out_specs.*replicat|replicat.*out_specs"):
                    jax.shard_map(same, in_specs=P("p"), out_specs=P())(x)

    def test_a_cast_to_what_varies(self):
        seen: dict[Words, list[str]] = {}
        with over(2):

            def block(by: Words) -> None:
                exp = by.function(jnp.exp, torch.exp)

                @jax.shard_map(in_specs=P(), out_specs=None)
                def program(x: jax.Array) -> None:
                    y = jax.lax.pcast(x, "p", to="varying")
                    seen[by] = _types(exp(x), exp(y))

                program(by.put(table(6), P()))

            for by in (JAX, OURS):
                block(by)
        assert seen[OURS] == seen[JAX] == ["float32[6]", "float32[6]{V:p}"]

    def test_casts_that_operations_bring(self):
        with over(2):

            def block(by: Words) -> Any:
                times = by.function(jnp.multiply, torch.multiply)
                program = jax.shard_map(times, in_specs=(P("p"), P()), out_specs=P("p"))
                x, y = by.put(table(6), P("p")), by.put(table(3, first=4), P())
                return jax.jit(program)(x, y), str(jax.make_jaxpr(program)(x, y)).count("pvary")

            got = block(OURS)
            alike(got, block(JAX))
            assert got[1] == 1

    @pytest.mark.parametrize("cast", [False, True])
    def test_the_carry_of_scan(self, cast):
        with over(2):

            def block(by: Words) -> Any:
                swap = by.function(lambda a, b: (b, a + b), lambda a, b: (b, a + b))

                @jax.shard_map(in_specs=(P("p"), P()), out_specs=P("p"))
                def program(x: jax.Array, y: jax.Array) -> Any:
                    y = jax.lax.pcast(y, "p", to="varying") if cast else y
                    return jax.lax.scan(lambda c, _: (swap(*c), ()), (x, y), (), length=3)[0]

                return jax.jit(program)(by.put(table(6), P("p")), by.put(table(3, first=4), P()))

            if cast:
                alike(block(OURS), block(JAX))
                return
            for by in (JAX, OURS):
                with pytest.raises(TypeError, match=r"scan.*carry(?s:.*)pcast"):
                    block(by)

    def test_gradients_are_summed_where_values_do_not_vary(self):
        with over(2):

            def block(by: Words) -> Any:
                miss = by.function(
                    lambda w, x: jnp.square(x @ w).sum(), lambda w, x: (x @ w).square().sum()
                )

                @jax.shard_map(in_specs=(P(), P("p")), out_specs=P())
                def loss(w: jax.Array, x: jax.Array) -> jax.Array:
                    return jax.lax.psum(miss(w, x), "p")

                return jax.jit(jax.grad(loss))(by.put(table(3), P()), by.put(table(4, 3), P("p")))

            alike(block(OURS), block(JAX))

    def test_sums_to_come_and_sums_that_were_taken(self):
        seen: dict[Words, list[str]] = {}
        with over(2):

            def block(by: Words) -> Any:
                x = by.put(table(8), P("p"))
                pending = jnp.einsum("i,i->", x, x, out_sharding=P(unreduced={"p"}))
                taken = by.move(table(4), P(reduced={"p"}))
                double = by.function(lambda x: x + x, lambda x: x + x)

                @jax.shard_map(
                    in_specs=(P("p"), P(), P(unreduced={"p"}), P(reduced={"p"})),
                    out_specs=(P("p"), P(), P()),
                )
                def program(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Any:
                    seen[by] = _types(a, b, c, d)
                    return double(a), double(b), jax.lax.psum(c, "p")

                return jax.jit(program)(x, table(4), pending, taken)

            alike(block(OURS), block(JAX))
        want = ["float32[4]{V:p}", "float32[4]", "float32[]{U:p}", "float32[4]{R:p}"]
        assert seen[OURS] == seen[JAX] == want
