"""What a traced step says of platforms and of lines inside functions of libraries."""

import jax
import jax.numpy as jnp
import pytest

from isoshard.core.runtime.jaxprs import equations
from isoshard.core.traced.source_lines import line_of
from isoshard.planner.estimating import estimate
from isoshard.planner.machine.topologies import topology
from isoshard.planner.traced.of_step import traced_step

X = jax.ShapeDtypeStruct((64, 64), "float32")


def step(x):
    once, twice = (lambda x: x @ x), (lambda x: x @ x @ x)
    return jax.lax.platform_dependent(x, cpu=twice, cuda=once, default=once)


@pytest.mark.parametrize(("machine", "products"), [("v5e:2x2", 1), ("h100:1x4", 1), ("cpu:4", 2)])
def test_the_branch_of_the_target_counts_alone(machine, products):
    mesh = topology(machine).mesh((4,), ("data",))
    assert estimate(step, (X,), mesh, None, batch=("x",)).flops == products * 2 * 64**3


def test_every_operation_of_a_librarys_function_has_the_line_that_calls_it():
    def lookup(table, rows):
        return jnp.take(table, rows, axis=0), jnp.take(table + 1, rows, axis=0)

    mesh = topology("v5e:2x2").mesh((4,), ("data",))
    rows = jax.ShapeDtypeStruct((8,), "int32")
    found = traced_step(lookup, (X, rows), {}, mesh)
    lines = [line_of(one) for one in equations(found.program) if one.primitive.name == "gather"]
    assert len(lines) == 2
    assert all("test_branches_and_lines.py" in one and "(lookup)" in one for one in lines)
