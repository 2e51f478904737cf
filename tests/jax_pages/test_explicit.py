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
X = table(8, 8)


@pytest.fixture
def typed():
    """Explicit axes, set for the block."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=EXPLICIT)
    with jax.set_mesh(mesh):
        yield mesh


def _types(*arrays: Any) -> list[str]:
    return [str(jax.typeof(one)) for one in arrays]


def _numbers_of_numpy(by: Words) -> Any:
    split = by.move(np.arange(10, dtype=np.int32).reshape(2, 5), P("a", None))
    return split, by.function(jnp.negative, torch.neg)(split)


def _two_layouts_meet(by: Words) -> Any:
    column = by.move(np.arange(6, dtype=np.int32).reshape(6, 1), P("a", None))
    row = by.move(np.arange(12, dtype=np.int32).reshape(1, 12), P(None, "b"))
    return column, row, by.function(jnp.add, torch.add)(column, row)


def _elementwise(by: Words) -> Any:
    def of(module: Any) -> Any:
        names = ("sin", "exp", "negative", "square", "abs")
        return lambda x: tuple(getattr(module, name)(x) for name in names)

    return by.function(of(jnp), of(torch))(by.put(X, P("a", "b")))


def _reshapes_of_axes_that_are_not_split(by: Words) -> Any:
    results = []
    for x, spec, shape in (
        (table(4, 8), P("a"), (4, 2, 2, 2)),
        (table(4, 4, 2), P("a", None, None), (4, 8)),
        (table(4, 8), P("b", None), (4, 2, 4, 1)),
    ):
        reshape = by.function(
            lambda x, shape=shape: x.reshape(shape), lambda x, shape=shape: x.reshape(shape)
        )
        results.append(reshape(by.put(x, spec)))
    return results


WITH_TENSORS = {
    _numbers_of_numpy: ["int32[2@a,5]"] * 2,
    _two_layouts_meet: ["int32[6@a,1]", "int32[1,12@b]", "int32[6@a,12@b]"],
    _elementwise: ["float32[8@a,8@b]"] * 5,
    _reshapes_of_axes_that_are_not_split: [
        "float32[4@a,2,2,2]",
        "float32[4@a,8]",
        "float32[4@b,2,4,1]",
    ],
}
"""Blocks that tensors can run as well, and the types of their results."""


def _gradients(by: Words) -> Any:
    square = by.function(lambda x: (jnp.sin(x) ** 2).sum(), lambda x: x.sin().pow(2).sum())
    return jax.jit(jax.value_and_grad(square))(by.put(X, P("a", "b")))


def _both_sides_of_cond(by: Words) -> Any:
    up, down = by.function(jnp.exp, torch.exp), by.function(lambda x: x - 1, lambda x: x - 1)
    program = jax.jit(lambda go, x: jax.lax.cond(go, up, down, x))
    x = by.put(X, P(None, "b"))
    return program(True, x), program(False, x)


def _the_carry_of_scan(by: Words) -> Any:
    step = by.function(lambda c, x: jnp.tanh(c + x), lambda c, x: torch.tanh(c + x))

    def body(carry: jax.Array, x: jax.Array) -> Any:
        new = step(carry, x)
        return new, new.sum()

    return jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(
        by.put(table(8), P("b")), by.put(table(5, 8, first=1), P(None, "b"))
    )


def _the_axis_of_vmap(by: Words) -> Any:
    row = by.function(lambda v: jnp.cos(v) * v, lambda v: torch.cos(v) * v)
    return [
        how(jax.vmap(row))(by.put(X, spec))
        for how, spec in ((jax.jit, P("a", None)), (lambda f: f, P(None, "b")))
    ]


OF_FUNCTIONS = (
    _gradients,
    _both_sides_of_cond,
    _the_carry_of_scan,
    _the_axis_of_vmap,
)


@pytest.mark.parametrize(
    ("block", "by"),
    list(zip(WITH_TENSORS, (TENSORS, OURS) * 2, strict=True)),
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_block_of_functions_or_tensors(typed, block, by):
    got = block(by)
    alike(got, block(JAX))
    assert _types(*got) == WITH_TENSORS[block]


@pytest.mark.parametrize("block", OF_FUNCTIONS, ids=lambda block: block.__name__)
def test_a_block(typed, block):
    got = block(OURS)
    alike(got, block(JAX))
    if block is _gradients:
        assert jax.typeof(got[1]) == jax.typeof(iso.shard(X, P("a", "b")))


def test_a_tensor_is_laid_out_over_the_mesh_that_is_set(typed):
    numbers = np.arange(10, dtype=np.int32).reshape(2, 5)
    for verb in (iso.shard, iso.reshard):
        split = verb(torch.from_numpy(numbers), P("a", None))
        alike(iso.to_jax(split), jax.reshard(numbers, P("a")))


def test_a_reshape_that_jax_asks_about(typed):
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


def test_a_function_of_no_arguments(typed):
    ones = iso.jax_function(lambda: torch.ones(4, 8), out_sharding=P("a", "b"))
    alike(jax.jit(ones)(), jnp.ones((4, 8), out_sharding=P("a", "b")))


def test_sides_of_cond_that_lie_otherwise(typed):
    up = iso.jax_function(torch.exp)
    down = iso.jax_function(lambda x: x - 1, out_sharding=P("a"))
    x = iso.shard(X, P(None, "b"))
    with pytest.raises(TypeError, match=r"float32\[8,8@b\].*float32\[8@a,8\]"):
        jax.jit(lambda x: jax.lax.cond(True, up, down, x))(x)


def test_shapes_with_layouts_are_enough_to_trace(typed):
    layout = iso.sharding_of(iso.shard(X, P("a")))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=layout)
    functions = (jnp.exp, iso.jax_function(torch.exp))
    one, other = (str(jax.eval_shape(f, shape).sharding.spec) for f in functions)
    assert one == other
    one, other = (jax.jit(f).trace(shape).out_info for f in functions)
    assert one == other


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

        got = block(OURS)
        alike(got, block(JAX))
        assert got[1] == str(AUTO)

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
                return part(y, in_sharding=P("a", "b")) + 1

            return program(by.put(table(4, 4), P("a", "b")))

        with jax.set_mesh(mesh):
            alike(block(OURS), block(JAX))
        assert seen[OURS] == seen[JAX] == ["float32[4@a,4@b]"] * 2

    def test_a_mesh_of_both_kinds(self):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))

        def block(by: Words) -> Any:
            x = by.put(X, P("a", "b"))
            return x, by.function(jnp.sin, torch.sin)(x), by.put(x, P("b", "a"))

        with jax.set_mesh(mesh):
            got, of_tensors, want = block(OURS), block(TENSORS), block(JAX)
            alike(got, want)
            alike(of_tensors, want)
        assert _types(*got) == ["float32[8@a,8]"] * 2 + ["float32[8,8@a]"]


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
