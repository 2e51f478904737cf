"""Layouts in the memory of the host: plans say them, tables show them, programs bring them in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.offload import (
    bring_in,
    brought_in_after,
    in_memory,
    is_offloaded,
    on_device,
    put_back,
)
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.resolved import ResolvedPlan

HOST = "pinned_host"


def resting(mesh):
    return in_memory(NamedSharding(mesh, P("x")), HOST)


def test_a_layout_in_another_memory(mesh):
    found = resting(mesh)
    assert found.memory_kind == HOST and is_offloaded(found)
    assert on_device(found) == NamedSharding(mesh, P("x"))
    assert not is_offloaded(on_device(found))
    assert in_memory(found, None) is found
    assert in_memory(found, "device").memory_kind == "device"
    assert is_offloaded(resting(AbstractMesh((8,), ("x",))))
    assert not is_offloaded(jax.numpy.ones(3).sharding)


def test_devices_without_the_memory(mesh):
    with pytest.raises(ShardingError, match=r"mu: its devices \(cpu\) have no memory 'disk'; they"):
        in_memory(NamedSharding(mesh, P()), "disk", name="mu")


def test_a_step_brings_in_and_puts_back(mesh):
    layout = resting(mesh)
    state = jax.device_put(jnp.arange(8.0), layout)

    @jax.jit
    def step(state, x):
        new = brought_in_after(state, x)
        return put_back(new * 2 + x, layout), bring_in(x)

    found, x = step(state, jnp.ones(8))
    assert found.sharding.memory_kind == HOST and x.sharding.memory_kind == "device"
    np.testing.assert_array_equal(found, 2 * np.arange(8.0) + 1)


class TestPlans:
    PLAN = Plan({"*": P("x")}, memory={"*.mu.*": HOST, "wte": HOST})

    def test_the_first_rule_decides(self):
        plan = Plan(memory=[("a.*", "device"), ("*", HOST)])
        assert [plan.memory_for(name) for name in ("a.b", "b")] == ["device", HOST]
        assert Plan().memory_for("a") is None
        assert repr(plan) == "Plan({}, memory={'a.*': 'device', '*': 'pinned_host'})"

    def test_products_and_otherwise_keep_them(self):
        assert (Plan({"*": P("y")}) * self.PLAN).memory_for("wte") == HOST
        assert self.PLAN.otherwise(Plan({"*": P()})).memory_for("0.mu.w") == HOST
        assert Plan({"a": P()}).otherwise(self.PLAN).memory_for("wte") == HOST

    def test_resolved_shown_and_kept(self, mesh):
        found = self.PLAN.resolve({"wte": (8, 4), "w": (8, 4)}, mesh)
        assert {n: s.memory_kind for n, s in found.shardings.items()} == {
            "wte": HOST,
            "w": "device",
        }
        assert "P('x',) in pinned_host" in str(found)
        found.check_golden(found.to_json())
        again = ResolvedPlan.from_json(found.to_json())
        assert again.shardings["wte"].memory_kind == HOST
        before = Plan({"*": P("x")})
        diff = before.diff(self.PLAN, {"wte": (8, 4)}, mesh)
        assert "P('x',) -> P('x',) in pinned_host" in str(diff)
        with pytest.raises(PlanError, match="in pinned_host"):
            found.check_golden(before.resolve({"wte": (8, 4), "w": (8, 4)}, mesh).to_json())

    def test_wrong_rules(self, mesh):
        with pytest.raises(PlanError, match=r"'a': 3 is none.*pinned_host"):
            Plan(memory={"a": 3})
        with pytest.raises(PlanError, match=r"a: its devices \(cpu\) have no memory 'disk'"):
            Plan({"*": P()}, memory={"a": "disk"}).resolve({"a": (8,)}, mesh)
