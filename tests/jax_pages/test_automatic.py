"""JAX's page on arrays over many devices, and on partitioning by the compiler, block for block."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, TENSORS, Function, Words, alike, refused, table

AUTO = (AxisType.Auto, AxisType.Auto)
both = pytest.mark.parametrize("by", [OURS, TENSORS], ids=["function", "tensors"])


@pytest.fixture
def typed():
    """JAX's default, set for the block: Explicit axes."""
    mesh = jax.make_mesh((4, 2), ("rows", "cols"))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def untyped():
    """The same devices under Auto axes, set for the block."""
    mesh = jax.make_mesh((4, 2), ("rows", "cols"), AUTO)
    with jax.set_mesh(mesh):
        yield mesh


class TestArraysOverAMesh:
    """Arrays that lie on many devices, and what is computed of them."""

    @both
    def test_a_first_array_and_what_is_computed_of_it(self, typed, by):
        def block(by: Words) -> Any:
            x = by.put(table(8, 4), P("rows", "cols"))
            y = by.function(lambda x: jnp.cos(x).T, lambda x: torch.cos(x).T)(x)
            return x, y

        alike(block(by), block(JAX))
        x, y = block(by)
        assert str(jax.typeof(x)) == "float32[8@rows,4@cols]"
        assert str(jax.typeof(y)) == "float32[4@cols,8@rows]"
        assert "8 blocks of [2, 2], each on 1 device" in iso.visualize(x)
        assert "mesh (rows=4 Explicit, cols=2 Explicit)" in iso.visualize(y)

    def test_meshes_and_the_one_that_is_set(self):
        explicit = jax.make_mesh((4, 2), ("rows", "cols"))
        plain = Mesh(explicit.devices, explicit.axis_names)
        for mesh, kind in ((explicit, AxisType.Explicit), (plain, AxisType.Auto)):
            assert mesh.axis_types == (kind, kind)
            with jax.set_mesh(mesh):
                x = iso.shard(table(8, 4), P("rows"))
                assert iso.sharding_of(x).mesh == jax.sharding.get_mesh() == mesh
                assert mesh.abstract_mesh == jax.sharding.get_abstract_mesh()
                y = iso.jax_function(torch.neg)(x)
            alike((x, y), (x, -x))

    def test_another_abstract_mesh_inside_jit(self, typed):
        flat = AbstractMesh((8,), ("all",), (AxisType.Explicit,))
        moves = {
            JAX: [lambda x: jax.reshard(x, P("all", None))],
            OURS: [
                lambda x: iso.shard(x, P("all", None)),  # over the mesh that is set
                lambda x: iso.reshard(x, P("all", None), flat),  # else it stays on its own
            ],
        }

        def block(by: Words, move: Function) -> Any:
            double = by.function(lambda x: x + x, lambda x: x + x)

            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                with jax.sharding.use_abstract_mesh(flat):
                    return double(move(x))

            return program(by.put(table(8, 4), P("rows", "cols")))

        want = block(JAX, *moves[JAX])
        assert str(jax.typeof(want)) == "float32[8@all,4]"
        for move in moves[OURS]:
            alike(block(OURS, move), want)

    def test_the_pieces_that_lie_on_the_devices(self, typed):
        theirs = jax.device_put(table(8, 4), P("rows", "cols"))
        x = iso.shard(table(8, 4), P("rows", "cols"))
        assert iso.sharding_of(x) == theirs.sharding
        pieces = iso.local_shards(x, framework="torch")
        assert len(pieces) == 8
        for piece, want in zip(pieces, theirs.addressable_shards, strict=True):
            assert piece.index == want.index
            np.testing.assert_array_equal(piece.data.numpy(), want.data)

    @both
    @pytest.mark.parametrize(
        "spec", [P("cols", "rows"), P("rows", None), P(None, "cols"), P(("rows", "cols")), P()]
    )
    def test_another_layout(self, typed, by, spec):
        def block(by: Words) -> Any:
            x = by.put(table(8, 8), P("rows", "cols"))
            x = by.function(lambda x: x * 3, lambda x: x * 3)(x)
            return by.put(x, spec), by.move(x, spec), jax.jit(lambda x: by.move(x, spec))(x)

        alike(block(by), block(JAX))

    def test_sums_that_are_not_taken_yet(self, typed):
        def block(by: Words) -> Any:
            pending = P("rows", None, unreduced={"cols"})
            y = by.put(table(8, 4), pending)
            return y, by.move(y, P("rows", None))

        alike(block(OURS), block(JAX))

    def test_arrays_on_two_meshes(self, typed):
        other = jax.make_mesh((8,), ("all",))

        def block(by: Words) -> Any:
            x = by.put(table(8, 4), P("rows", "cols"))
            return x, by.put(x, NamedSharding(other, P("all", None)))

        alike(block(OURS), block(JAX))
        x, z = block(OURS)
        alike(iso.reshard(x, P("all"), other), z)
        of_tensors = TENSORS.function(jnp.tanh, torch.tanh)  # whatever mesh is set
        assert [of_tensors(one).sharding.mesh for one in (x, z)] == [typed, other]
        with jax.set_mesh(other):
            alike(of_tensors(z), jnp.tanh(z))


class TestTypes:
    """Explicit axes: layouts that a program can ask for while it is traced."""

    def test_a_layout_is_known_under_jit(self, typed):
        seen = []

        @jax.jit
        def program(x: jax.Array) -> jax.Array:
            y = iso.jax_function(torch.exp)(x)
            seen.append((jax.typeof(y), iso.sharding_of(x).spec))
            return y

        x = iso.shard(table(8, 4), P("rows", "cols"))
        alike(program(x), jax.jit(jnp.exp)(x))
        assert seen == [(jax.typeof(x), P("rows", "cols"))]

    @both
    def test_two_layouts_meet(self, typed, by):
        def block(by: Words) -> Any:
            column = by.put(np.arange(8, dtype=np.int32).reshape(8, 1), P("rows", None))
            row = by.put(np.arange(4, dtype=np.int32).reshape(1, 4), P(None, "cols"))
            return by.function(jnp.subtract, torch.subtract)(column, row)

        alike(block(by), block(JAX))
        assert str(jax.typeof(block(by))) == "int32[8@rows,4@cols]"

    def test_two_layouts_meet_under_jit(self, typed):
        column = iso.shard(table(8, 1), P("rows", None))
        row = iso.shard(table(1, 4, first=3), P(None, "cols"))
        types: dict[Words, str] = {}

        def block(by: Words) -> Any:
            multiply = by.function(jnp.multiply, torch.multiply)

            @jax.jit
            def program(x: jax.Array, y: jax.Array) -> jax.Array:
                z = multiply(x, y)
                types[by] = [str(jax.typeof(one)) for one in (x, y, z)]
                return z

            return program(column, row)

        alike(block(OURS), block(JAX))
        assert types[OURS] == types[JAX]
        assert types[JAX] == ["float32[8@rows,1]", "float32[1,4@cols]", "float32[8@rows,4@cols]"]

    @both
    def test_a_sum_over_devices(self, typed, by):
        def block(by: Words) -> Any:
            x = jax.random.normal(jax.random.key(3), (8, 4), out_sharding=P("rows", "cols"))
            return by.function(lambda x: x.sum(0), lambda x: x.sum(0))(x)

        alike(block(by), block(JAX))

    def test_a_sum_over_devices_communicates_as_in_jax(self, typed):
        x = iso.shard(table(8, 4), P("rows", "cols"))
        texts = [
            jax.jit(total).lower(x).compile().as_text()
            for total in (lambda x: x.sum(0), iso.jax_function(lambda x: x.sum(0)))
        ]
        assert [text.count("all-reduce(") for text in texts] == [1, 1]


def _factors(by: Words) -> tuple[jax.Array, jax.Array]:
    return by.put(table(8, 4), P(None, "rows")), by.put(table(4, 16, first=5), P("rows", None))


class TestOpenLayouts:
    """What JAX asks its users along Explicit axes, the compiler answers for torch code."""

    def test_a_product_over_split_axes(self, typed):
        with refused("ambiguous how the output should be sharded"):
            jnp.dot(*_factors(JAX))
        with refused("ambiguous how the output should be sharded"):
            jnp.dot(*_factors(OURS))
        want = jnp.dot(*_factors(JAX), out_sharding=P())
        product = iso.jax_function(torch.matmul)
        alike(product(*_factors(OURS)), want)
        alike(jax.jit(product)(*_factors(OURS)), want)
        alike(TENSORS.function(jnp.dot, torch.matmul)(*_factors(OURS)), want)

    @both
    @pytest.mark.parametrize("spec", [P("rows", None), P(None, "rows"), P("cols", "rows"), P()])
    def test_a_product_whose_layout_is_said(self, typed, by, spec):
        def block(by: Words) -> Any:
            return by.function(jnp.dot, torch.matmul, spec)(*_factors(by))

        alike(block(by), block(JAX))

    @pytest.mark.parametrize("spec", [P("rows", None), P(None, "rows")])
    def test_a_product_whose_layout_is_said_under_jit(self, typed, spec):
        def block(by: Words) -> Any:
            return jax.jit(by.function(jnp.dot, torch.matmul, spec))(*_factors(by))

        alike(block(OURS), block(JAX))

    def test_a_layout_that_does_not_fit(self, typed):
        for spec, fault in ((P("rows", "rows"), "rows"), (P(None, None, "rows"), "rank 2")):
            product = iso.jax_function(torch.matmul, out_sharding=spec)
            for call in (product, jax.jit(product)):
                with pytest.raises(iso.ShardingError, match=f"result.*matmul.*{fault}"):
                    call(*_factors(OURS))

    def test_a_sum_that_would_name_an_axis_twice(self, typed):
        x = iso.shard(table(4, 4), P("rows", None))
        y = iso.shard(table(4, 4, first=2), P(None, "rows"))
        with refused(r"add operation.*illegally sharded result"):
            jnp.add(x, y)
        total = iso.jax_function(torch.add)
        alike(total(x, y), jax.reshard(x, P()) + jax.reshard(y, iso.sharding_of(total(x, y)).spec))
        assert jax.typeof(jax.jit(total)(x, y)).sharding.mesh == typed.abstract_mesh
        np.testing.assert_array_equal(jax.jit(total)(x, y), np.asarray(x) + np.asarray(y))


class TestTheCompilerChooses:
    """Auto axes, for one function or for a whole mesh."""

    @pytest.mark.parametrize("jit", [False, True])
    def test_auto_axes_and_the_layout_of_the_result(self, typed, jit):
        def block(by: Words) -> Any:
            x = by.put(np.arange(16).reshape(4, 4), P("rows", None))
            y = by.put(np.arange(16).reshape(4, 4) % 5, P(None, "rows"))
            inside = []

            @jax.sharding.auto_axes
            def program(x: jax.Array, y: jax.Array) -> jax.Array:
                inside.append(jax.sharding.get_abstract_mesh().axis_types)
                return by.function(jnp.add, torch.add)(x, y)

            run = functools.partial(program, out_sharding=P("rows", None))
            return (jax.jit(run) if jit else run)(x, y), str(inside[0])

        alike(block(OURS), block(JAX))
        assert block(OURS)[1] == str(AUTO)

    @both
    def test_a_product_whose_layout_the_compiler_chooses(self, untyped, by):
        def block(by: Words) -> Any:
            return by.function(jnp.dot, torch.matmul)(*_factors(by))

        alike(block(by), block(JAX))

    def test_a_product_that_is_constrained(self, untyped):
        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)
            ask = jax.lax.with_sharding_constraint if by is JAX else iso.shard
            return jax.jit(lambda x, y: ask(dot(x, y), P("rows", None)))(*_factors(by))

        alike(block(OURS), block(JAX))
        assert block(OURS).sharding.spec[0] == "rows"

    def test_a_constraint_along_explicit_axes_is_a_check(self, typed):
        x = iso.shard(table(8, 4), P("rows", "cols"))
        exp = iso.jax_function(torch.exp)
        same = jax.jit(lambda x: jax.lax.with_sharding_constraint(exp(x), P("rows", "cols")))
        alike(same(x), jnp.exp(x))
        with pytest.raises(AssertionError, match=r"acts as an assert .*P\('cols', 'rows'\)"):
            jax.jit(lambda x: jax.lax.with_sharding_constraint(exp(x), P("cols", "rows")))(x)

    def test_explicit_axes_for_one_function(self, untyped):
        inside: dict[Words, Any] = {}

        def block(by: Words) -> Any:
            @jax.sharding.explicit_axes
            def typed_part(y: jax.Array) -> jax.Array:
                z = by.function(lambda y: y * 3, lambda y: y * 3)(y)
                inside[by] = [str(jax.typeof(one)) for one in (y, z)]
                return z

            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                y = by.function(jnp.sin, torch.sin)(x)
                return typed_part(y, in_sharding=P("rows", "cols")) - 1

            return program(by.put(table(4, 4), P("rows", "cols")))

        alike(block(OURS), block(JAX))
        assert inside[OURS] == inside[JAX] == ["float32[4@rows,4@cols]"] * 2

    def test_what_an_array_says_and_what_its_type_says(self, typed):
        def block(by: Words) -> Any:
            seen = []

            def compare(x: jax.Array) -> jax.Array:
                seen.append((x.sharding.spec, jax.typeof(x).sharding.spec))
                return x

            x = by.function(jnp.sin, torch.sin)(by.put(table(8), P("rows")))
            compare(x)
            jax.sharding.auto_axes(compare)(x, out_sharding=P("rows"))
            return x, [str(spec) for pair in seen for spec in pair]

        (x, seen), want = block(OURS), block(JAX)
        alike(x, want[0])
        assert seen == want[1] == ["P('rows',)"] * 3 + ["P(None,)"]


class TestManual:
    def test_collectives_written_out(self, typed):
        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)

            @jax.shard_map(out_specs=P("rows", None))
            def product(x: jax.Array, y: jax.Array) -> jax.Array:
                return jax.lax.psum_scatter(dot(x, y), "rows", tiled=True)

            return product(*_factors(by))

        alike(block(OURS), block(JAX))
        whole = jnp.dot(*_factors(JAX), out_sharding=P("rows", None))
        alike(block(OURS), whole)


class TestMemoryOrder:
    """How the numbers of a shard lie in its memory."""

    def test_the_order_that_the_compiler_asks_for(self):
        shape = jax.ShapeDtypeStruct((16, 8), jnp.float32)
        orders = []
        for by in (JAX, OURS):
            cut = by.function(lambda x, y: (x[3, :], y[:, 2]), lambda x, y: (x[3, :], y[:, 2]))
            grown = by.function(lambda x, y: (x * 5, y - 1), lambda x, y: (x * 5, y - 1))
            any_order = Format(Layout.AUTO)
            cut = jax.jit(cut, in_shardings=any_order, out_shardings=any_order)
            cut = cut.lower(shape, shape).compile()
            asked, _ = cut.input_formats
            grown = jax.jit(grown, out_shardings=asked).lower(shape, shape).compile()
            assert grown.output_formats == asked
            orders.append([one.layout.major_to_minor for one in asked])
            row, column = cut(*grown(table(16, 8), table(16, 8)))
            np.testing.assert_array_equal(row, table(16, 8)[3] * 5)
            np.testing.assert_array_equal(column, table(16, 8)[:, 2] - 1)
        assert orders[0] == orders[1]

    def test_an_order_inside_jit(self, typed):
        def block(by: Words) -> Any:
            turn = by.function(lambda x: x.T, lambda x: x.T)

            @jax.jit
            def program(x: jax.Array) -> jax.Array:
                return with_layout_constraint(turn(x), Layout(major_to_minor=(0, 1))) + 1

            return program(by.put(table(8, 4), P("rows", "cols")))

        alike(block(OURS), block(JAX))

    def test_an_array_of_another_order_keeps_its_numbers(self, typed):
        by_columns = Format(Layout(major_to_minor=(1, 0)), NamedSharding(typed, P("rows", "cols")))
        x = jax.device_put(table(8, 4), by_columns)
        alike(iso.shard(x, P("cols", "rows")), jax.device_put(x, P("cols", "rows")))
        alike(iso.jax_function(torch.sin)(x), jnp.sin(x))
        alike(TENSORS.function(jnp.sin, torch.sin)(x), jnp.sin(x))
