"""JAX's page on layouts in types, block for block, and what it says of transformations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, TENSORS, Words, alike, refused, table

EXPLICIT, AUTO = (AxisType.Explicit,) * 2, (AxisType.Auto,) * 2
both = pytest.mark.parametrize("by", [OURS, TENSORS], ids=["function", "tensors"])


@pytest.fixture
def typed():
    """Explicit axes, set for the block."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        yield mesh


def _types(*arrays: Any) -> list[str]:
    return [str(jax.typeof(one)) for one in arrays]


class TestTypes:
    def test_of_values_on_no_mesh(self):
        seen: dict[Words, list[str]] = {}

        def block(by: Words) -> Any:
            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                y = by.function(lambda x: x * x, lambda x: x * x)(x)
                seen[by] = _types(x, y)
                return y

            return program(np.arange(6, dtype=np.int32))

        alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX] == ["int32[6]"] * 2

    def test_the_mesh_that_is_set(self, typed):
        assert jax.sharding.get_abstract_mesh() == typed.abstract_mesh
        x = iso.reshard(table(6, 4), P("a"))
        assert iso.sharding_of(x).mesh == typed
        assert iso.sharding_of(iso.to_torch(x)).mesh == typed
        assert typed.axis_types == EXPLICIT

    @both
    def test_numbers_of_numpy_are_laid_out(self, typed, by):
        def block(by: Words) -> Any:
            whole = np.arange(10, dtype=np.int32).reshape(2, 5)
            split = by.move(whole, P("a", None))
            return split, by.function(jnp.negative, torch.neg)(split)

        alike(block(by), block(JAX))
        assert _types(*block(by)) == ["int32[2@a,5]"] * 2

    def test_a_tensor_is_laid_out_over_the_mesh_that_is_set(self, typed):
        for verb in (iso.shard, iso.reshard):
            split = verb(torch.arange(10, dtype=torch.int32).reshape(2, 5), P("a", None))
            alike(
                iso.to_jax(split), jax.reshard(np.arange(10, dtype=np.int32).reshape(2, 5), P("a"))
            )

    @both
    def test_layouts_go_through_operations(self, typed, by):
        def block(by: Words) -> Any:
            column = by.move(np.arange(6, dtype=np.int32).reshape(6, 1), P("a", None))
            row = by.move(np.arange(12, dtype=np.int32).reshape(1, 12), P(None, "b"))
            return column, row, by.function(jnp.add, torch.add)(column, row)

        alike(block(by), block(JAX))
        assert _types(*block(by)) == ["int32[6@a,1]", "int32[1,12@b]", "int32[6@a,12@b]"]

    def test_layouts_go_through_operations_under_jit(self, typed):
        seen: dict[Words, list[str]] = {}

        def block(by: Words) -> Any:
            maximum = by.function(jnp.maximum, torch.maximum)

            @jax.jit
            def program(x: jax.Array, y: jax.Array) -> jax.Array:
                z = maximum(x, y)
                seen[by] = _types(x, y, z)
                return z

            return program(by.move(table(6, 1), P("a")), by.move(table(1, 12), P(None, "b")))

        alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX] == ["float32[6@a,1]", "float32[1,12@b]", "float32[6@a,12@b]"]


class TestRules:
    """Which operations say how their result lies, and which ask."""

    @both
    @pytest.mark.parametrize("name", ["sin", "exp", "negative", "square", "abs"])
    def test_elementwise(self, typed, by, name):
        def block(by: Words) -> Any:
            return by.function(getattr(jnp, name), getattr(torch, name))(by.put(X, P("a", "b")))

        alike(block(by), block(JAX))

    @both
    @pytest.mark.parametrize(("one", "other"), [("a", "a"), ("a", None), (None, "b")])
    def test_axes_side_by_side(self, typed, by, one, other):
        def block(by: Words) -> Any:
            x, y = by.put(X, P(None, one)), by.put(X, P(None, other))
            return by.function(jnp.multiply, torch.multiply)(x, y)

        alike(block(by), block(JAX))

    @both
    @pytest.mark.parametrize(
        ("spec", "shape"),
        [(P("a"), (4, 2, 2, 2)), (P("a", None, None), (4, 8)), (P("b", None), (4, 2, 4, 1))],
    )
    def test_reshapes_of_axes_that_are_not_split(self, typed, by, spec, shape):
        def block(by: Words) -> Any:
            x = by.put(table(4, 4, 2) if len(spec) == 3 else table(4, 8), spec)
            return by.function(lambda x: x.reshape(shape), lambda x: x.reshape(shape))(x)

        alike(block(by), block(JAX))

    def test_a_reshape_that_jax_asks_about(self, typed):
        x = iso.shard(table(4, 6), P("b", "a"))
        with refused("out_sharding"):
            jnp.reshape(x, (2, 12))
        want = jnp.reshape(x, (2, 12), out_sharding=P("a", None))
        reshape = iso.jax_function(lambda x: x.reshape(2, 12), out_sharding=P("a", None))
        alike(reshape(x), want)
        alike(jax.jit(reshape)(x), want)
        chosen = jax.jit(iso.jax_function(lambda x: x.reshape(2, 12)))(x)
        assert jax.typeof(chosen).sharding.mesh == typed.abstract_mesh
        np.testing.assert_array_equal(chosen, want)

    def test_arrays_made_of_nothing(self, typed):
        def block(by: Words, spec: Any) -> Any:
            ones = by.function(jnp.ones, lambda shape: torch.ones(shape, device="jax"), spec)
            return jax.jit(lambda: ones((4, 8)))()

        for spec in (P("a", "b"), P(None, "b"), P()):
            alike(block(OURS, spec), block(JAX, spec))
        assert jax.typeof(block(OURS, None)) == jax.typeof(block(JAX, None))

    def test_functions_of_no_arguments(self, typed):
        ones = iso.jax_function(lambda: torch.ones(4, 8), out_sharding=P("a", "b"))
        alike(jax.jit(ones)(), jnp.ones((4, 8), out_sharding=P("a", "b")))


X = table(8, 8)


class TestTransformations:
    """Types match where JAX wants equal types."""

    def test_gradients_lie_as_what_they_are_of(self, typed):
        def block(by: Words) -> Any:
            square = by.function(lambda x: (jnp.sin(x) ** 2).sum(), lambda x: x.sin().pow(2).sum())
            x = by.put(X, P("a", "b"))
            return jax.jit(jax.grad(square))(x), jax.jit(jax.value_and_grad(square))(x)

        alike(block(OURS), block(JAX))
        assert jax.typeof(block(OURS)[0]) == jax.typeof(iso.shard(X, P("a", "b")))

    def test_both_sides_of_cond(self, typed):
        def block(by: Words) -> Any:
            up = by.function(jnp.exp, torch.exp)
            down = by.function(lambda x: x - 1, lambda x: x - 1)
            x = by.put(X, P(None, "b"))
            program = jax.jit(lambda go, x: jax.lax.cond(go, up, down, x))
            return program(True, x), program(False, x)

        alike(block(OURS), block(JAX))

    def test_sides_of_cond_that_lie_otherwise(self, typed):
        up = iso.jax_function(torch.exp)
        down = iso.jax_function(lambda x: x - 1, out_sharding=P("a"))
        x = iso.shard(X, P(None, "b"))
        with pytest.raises(TypeError, match=r"float32\[8,8@b\].*float32\[8@a,8\]"):
            jax.jit(lambda x: jax.lax.cond(True, up, down, x))(x)

    def test_the_carry_of_scan(self, typed):
        def block(by: Words) -> Any:
            step = by.function(lambda c, x: jnp.tanh(c + x), lambda c, x: torch.tanh(c + x))

            def body(carry: jax.Array, x: jax.Array) -> Any:
                new = step(carry, x)
                return new, new.sum()

            return jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(
                by.put(table(8), P("b")), by.put(table(5, 8, first=1), P(None, "b"))
            )

        alike(block(OURS), block(JAX))

    @pytest.mark.parametrize("spec", [P("a", None), P(None, "b"), P("a", "b")])
    def test_the_axis_of_vmap(self, typed, spec):
        def block(by: Words) -> Any:
            row = by.function(lambda v: jnp.cos(v) * v, lambda v: torch.cos(v) * v)
            x = by.put(X, spec)
            return jax.vmap(row)(x), jax.jit(jax.vmap(row))(x)

        alike(block(OURS), block(JAX))

    def test_shapes_with_layouts_are_enough_to_trace(self, typed):
        shape = jax.ShapeDtypeStruct(
            (8, 8), jnp.float32, sharding=iso.sharding_of(iso.shard(X, P("a")))
        )
        found = [
            str(jax.eval_shape(f, shape).sharding.spec)
            for f in (jnp.exp, iso.jax_function(torch.exp))
        ]
        traced = [jax.jit(f).trace(shape).out_info for f in (jnp.exp, iso.jax_function(torch.exp))]
        assert found[0] == found[1] and traced[0] == traced[1]


class TestAutoAxes:
    def test_a_sum_that_types_do_not_allow(self, typed):
        def block(by: Words) -> Any:
            x = by.move(np.arange(36, dtype=np.int32).reshape(6, 6), P("a", None))
            y = by.move(np.arange(36, dtype=np.int32)[::-1].reshape(6, 6), P(None, "a"))
            with refused(r"add operation with inputs: .* illegally sharded result"):
                x + y
            meshes = []

            @auto_axes
            def program(x: jax.Array, y: jax.Array) -> jax.Array:
                meshes.append(str(jax.sharding.get_abstract_mesh().axis_types))
                return by.function(jnp.add, torch.add)(x, y)

            return program(x, y, out_sharding=P("a", None)), meshes[0]

        alike(block(OURS), block(JAX))
        assert block(OURS)[1] == str(AUTO)

    @both
    def test_the_same_said_of_the_torch_function(self, typed, by):
        x, y = iso.shard(X, P("a", None)), iso.shard(X.T, P(None, "a"))
        want = auto_axes(jnp.add, out_sharding=P("a", None))(x, y)
        alike(by.function(jnp.add, torch.add, P("a", None))(x, y), want)

    def test_auto_along_one_axis(self, typed):
        seen: dict[Words, list[str]] = {}

        def block(by: Words) -> Any:
            @functools.partial(auto_axes, axes="a")
            def part(y: jax.Array) -> jax.Array:
                z = by.function(lambda y: y * 5, lambda y: y * 5)(y)
                seen[by] = _types(y, z)
                return z

            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                y = by.function(jnp.cos, torch.cos)(x)
                z = part(y, out_sharding=P("a", "b"))
                seen[by] += _types(y, z)
                return z - 1

            return program(by.move(table(4, 4), P("a", "b")))

        alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX] == ["float32[4,4@b]"] * 2 + ["float32[4@a,4@b]"] * 2

    def test_explicit_axes_inside_auto_ones(self):
        seen: dict[Words, list[str]] = {}
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=AUTO)

        def block(by: Words) -> Any:
            @functools.partial(explicit_axes, axes=("a", "b"))
            def part(y: jax.Array) -> jax.Array:
                z = by.function(jnp.square, torch.square)(y)
                seen[by] = _types(y, z)
                return z

            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                y = by.function(jnp.cos, torch.cos)(x)
                seen[by] = []
                return part(y, in_sharding=P("a", "b")) + 1

            return program(by.put(table(4, 4), P("a", "b")))

        with jax.set_mesh(mesh):
            alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX] == ["float32[4@a,4@b]"] * 2

    def test_the_layout_of_an_array_and_of_its_type(self, typed):
        def block(by: Words) -> Any:
            seen = []

            def look(x: jax.Array) -> jax.Array:
                seen.append(f"{x.sharding.spec} {jax.typeof(x).sharding.spec}")
                return x

            x = by.function(jnp.tanh, torch.tanh)(by.move(table(12), P("b")))
            look(x)
            return auto_axes(look)(x, out_sharding=P("b")), seen

        alike(block(OURS), block(JAX))
        assert block(OURS)[1] == ["P('b',) P('b',)", "P('b',) P(None,)"]

    def test_a_mesh_of_both_kinds(self):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))

        def block(by: Words) -> Any:
            x = by.put(X, P("a", "b"))
            return x, by.function(jnp.sin, torch.sin)(x), by.put(x, P("b", "a"))

        with jax.set_mesh(mesh):
            for by in (OURS, TENSORS):
                alike(block(by), block(JAX))
            assert _types(*block(OURS)) == ["float32[8@a,8]"] * 2 + ["float32[8,8@a]"]


class TestJaxFunctionsInTorch:
    """The page's functions, called with tensors over the same buffers."""

    def test_types_are_seen_and_errors_told(self, typed):
        seen: list[str] = []

        def program(x: jax.Array, y: jax.Array) -> jax.Array:
            z = x + y
            seen.extend(_types(x, y, z))
            return z

        x, y = iso.shard(table(6, 1), P("a")), iso.shard(table(1, 12), P(None, "b"))
        got = iso.torch_function(program)(iso.to_torch(x), iso.to_torch(y))
        alike(iso.to_jax(got), program(x, y))
        assert seen[:3] == ["float32[6@a,1]", "float32[1,12@b]", "float32[6@a,12@b]"]
        left, right = iso.shard(X, P(None, "a")), iso.shard(X, P("a", None))
        with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
            iso.to_jax(iso.torch_function(jnp.dot)(iso.to_torch(left), iso.to_torch(right)))

    def test_a_layout_is_said_inside(self, typed):
        dot = functools.partial(jnp.dot, out_sharding=P("a", "b"))
        left, right = iso.shard(X, P(None, "a")), iso.shard(X, P("a", None))
        got = iso.torch_function(dot)(iso.to_torch(left), iso.to_torch(right))
        alike(iso.to_jax(got), dot(left, right))
        move = lambda x: jax.reshard(x, P("b", "a")) * 2  # noqa: E731
        alike(iso.to_jax(iso.torch_function(move)(iso.to_torch(left))), move(left))
