"""Operators that say themselves how they are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout import custom_partitioning as partitioning
from isoshard.core.transfer.device_put import shard

ASKED = []


def whole(power, x, y):
    return x**power if y is None else x**power + y


def split(power, mesh, operands, results):
    ASKED.append((power, mesh.shape, operands[0].sharding.spec))
    lies = operands[0].sharding
    needs = (lies, None if operands[1] is None else lies)
    return mesh, lambda x, y: whole(power, x, y), lies, needs


def rule(power, shapes):
    return ", ".join(["i"] * len(shapes)) + " -> i", {}


RAISED = partitioning.partitioned(whole, split, rule)


def test_it_is_asked_with_the_layouts_and_on_one_device_not(mesh):
    ASKED.clear()
    x = np.arange(8, dtype=np.float32)
    assert jax.jit(lambda x: RAISED(2, x, None))(x).tolist() == (x**2).tolist()
    assert not ASKED
    placed = shard(x, mesh, ("y",))
    found = jax.jit(lambda x: RAISED(3, x, x))(placed)
    assert found.tolist() == (x**3 + x).tolist() and found.sharding.spec == P("y")
    assert ASKED == [(3, mesh.shape, P("y"))]


def test_64_bits_are_kept_in_the_thread_of_the_compiler(mesh, x64):
    placed = shard(np.arange(8.0), mesh, ("y",))
    assert jax.jit(lambda x: RAISED(2, x, None))(placed).dtype == jnp.float64


def test_what_it_is_told_is_in_the_text_of_the_program(mesh):
    """All but the address of an object, which differs each time."""

    def text(power):
        lowered = jax.jit(lambda x: RAISED(power, x, None)).lower(placed).as_text()
        return [line for line in lowered.splitlines() if "CustomSPMD" not in line]

    placed = shard(np.arange(8, dtype=np.float32), mesh, ("y",))
    assert text(2) == text(2) != text(3)


@pytest.mark.parametrize(
    "spec", [P("y/0", None, "x"), P(None, "y/1", "y/0"), P(("y/1", "x"), "y/0")]
)
def test_layouts_by_a_part_of_a_mesh_axis(spec, mesh):
    """As the compiler makes them of axes shorter than the mesh's."""
    grid = partitioning._in_factors(mesh)
    x = jax.ShapeDtypeStruct((4, 4, 4), np.float32, sharding=NamedSharding(grid, spec))
    told = x.update(sharding=GSPMDSharding.get_replicated(mesh.devices.ravel().tolist()))
    hlo = x.sharding._to_xla_hlo_sharding(3)
    given = x.update(sharding=GSPMDSharding(tuple(mesh.devices.ravel()), hlo))
    found, (first, second) = partitioning._decoded(mesh, (given, told))
    assert dict(found.shape) == {"x": 2, "y/0": 2, "y/1": 2} == dict(grid.shape)
    assert first.sharding.is_equivalent_to(x.sharding, 3)
    assert second.sharding.is_fully_replicated


def test_a_layout_of_no_mesh_is_taken_for_a_whole_array(mesh):
    """Here of devices in an order that no axes have."""
    tiled = xla_client.OpSharding()
    tiled.type = xla_client.OpSharding.Type.OTHER
    tiled.tile_assignment_dimensions = [8]
    tiled.tile_assignment_devices = [0, 3, 1, 2, 4, 5, 7, 6]
    odd = GSPMDSharding(tuple(mesh.devices.ravel()), xla_client.HloSharding.from_proto(tiled))
    x = jax.ShapeDtypeStruct((8,), np.float32, sharding=odd)
    grid, one = partitioning._decoded(mesh, x)
    assert grid == mesh and one.sharding.is_fully_replicated


def products(static, mesh, operands, result):
    """Each device multiplies its rows by the whole matrix."""
    rows = NamedSharding(mesh, P(operands[0].sharding.spec[0]))
    return mesh, lambda x, w: x @ w, rows, (rows, NamedSharding(mesh, P()))


MULTIPLIED = partitioning.partitioned(
    lambda static, x, w: x @ w, products, lambda static, shapes: ("i j, k l -> i m", {})
)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_a_mapped_axis_is_split_too_and_derivatives_are_those_of_the_whole(axes, mesh):
    x, w = np.ones((4, 3), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    specs = [P("y"), P()]
    given = [x, w]
    for at, axis in enumerate(axes):
        if axis == 0:
            given[at] = np.stack([given[at], 2 * given[at]])
            specs[at] = P("x", *specs[at])
    placed = [shard(leaf, mesh, spec) for leaf, spec in zip(given, specs, strict=True)]
    ours = jax.jit(jax.vmap(lambda x, w: MULTIPLIED(0, x, w), axes)).lower(*placed).compile()
    assert "all-gather" not in ours.as_text()
    np.testing.assert_array_equal(ours(*placed), jax.vmap(jnp.matmul, axes)(*given))

    def gradients(multiply):
        slopes = jax.grad(lambda x, w: (multiply(x, w) ** 2).sum(), (0, 1))
        return jax.jit(jax.vmap(slopes, axes))(*placed)

    found = gradients(functools.partial(MULTIPLIED, 0))
    for got, want in zip(found, gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(got, want)
