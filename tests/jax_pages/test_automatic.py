"""JAX's page on arrays over many devices, and on partitioning by the compiler, block for block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from tests.jax_pages.blocks import JAX, OURS, TENSORS, Function, Words, alike, refused, table

AUTO = (AxisType.Auto, AxisType.Auto)


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

    def test_a_first_array_and_what_is_computed_of_it(self, typed):
        def block(by: Words) -> Any:
            x = by.put(table(8, 4), P("rows", "cols"))
            y = by.function(lambda x: jnp.cos(x).T, lambda x: torch.cos(x).T)(x)
            return x, y

        got = block(TENSORS)
        alike(got, block(JAX))
        x, y = got
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
                lambda x: iso.reshard(x, flat, P("all", None)),  # else it stays on its own
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

    @pytest.mark.parametrize(
        ("by", "spec"), [(OURS, P("cols", "rows")), (TENSORS, P(("rows", "cols")))]
    )
    def test_another_layout(self, typed, by, spec):
        def block(by: Words) -> Any:
            x = by.put(table(8, 8), P("rows", "cols"))
            x = by.function(lambda x: x * 3, lambda x: x * 3)(x)
            return by.put(x, spec), by.move(x, spec), jax.jit(lambda x: by.move(x, spec))(x)

        alike(block(by), block(JAX))

    def test_arrays_on_two_meshes(self, typed):
        other = jax.make_mesh((8,), ("all",))

        def block(by: Words) -> Any:
            x = by.put(table(8, 4), P("rows", "cols"))
            return x, by.put(x, NamedSharding(other, P("all", None)))

        got = block(OURS)
        alike(got, block(JAX))
        x, z = got
        alike(iso.reshard(x, other, P("all")), z)
        of_tensors = TENSORS.function(jnp.tanh, torch.tanh)  # whatever mesh is set
        assert [of_tensors(one).sharding.mesh for one in (x, z)] == [typed, other]
        with jax.set_mesh(other):
            alike(of_tensors(z), jnp.tanh(z))


class TestTypes:
    """Explicit axes: layouts that a program can ask for while it is traced."""

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

    @pytest.mark.parametrize(
        ("by", "spec"), [(OURS, P("rows", None)), (TENSORS, P("cols", "rows"))]
    )
    def test_a_product_whose_layout_is_said(self, typed, by, spec):
        def block(by: Words) -> Any:
            product = by.function(jnp.dot, torch.matmul, spec)
            return (jax.jit(product) if by is OURS else product)(*_factors(by))

        alike(block(by), block(JAX))

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

    def test_a_product_whose_layout_the_compiler_chooses(self, untyped):
        def block(by: Words) -> Any:
            return by.function(jnp.dot, torch.matmul)(*_factors(by))

        alike(block(TENSORS), block(JAX))

    def test_a_product_that_is_constrained(self, untyped):
        def block(by: Words) -> Any:
            dot = by.function(jnp.dot, torch.matmul)
            ask = jax.lax.with_sharding_constraint if by is JAX else iso.shard
            return jax.jit(lambda x, y: ask(dot(x, y), P("rows", None)))(*_factors(by))

        got = block(OURS)
        alike(got, block(JAX))
        assert got.sharding.spec[0] == "rows"

    def test_a_constraint_along_explicit_axes_is_a_check(self, typed):
        x = iso.shard(table(8, 4), P("rows", "cols"))
        exp = iso.jax_function(torch.exp)
        same = jax.jit(lambda x: jax.lax.with_sharding_constraint(exp(x), P("rows", "cols")))
        alike(same(x), jnp.exp(x))
        with pytest.raises(AssertionError, match=r"acts as an assert .*P\('cols', 'rows'\)"):
            jax.jit(lambda x: jax.lax.with_sharding_constraint(exp(x), P("cols", "rows")))(x)


class TestMemoryOrder:
    """How the numbers of a shard lie in its memory."""

    def test_an_array_of_another_order_keeps_its_numbers(self, typed):
        by_columns = Format(Layout(major_to_minor=(1, 0)), NamedSharding(typed, P("rows", "cols")))
        x = jax.device_put(table(8, 4), by_columns)
        alike(iso.shard(x, P("cols", "rows")), jax.device_put(x, P("cols", "rows")))
        alike(iso.jax_function(torch.sin)(x), jnp.sin(x))
        alike(TENSORS.function(jnp.sin, torch.sin)(x), jnp.sin(x))
