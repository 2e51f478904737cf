"""Layouts in the memory of the host: plans say them, tables show them, programs bring them in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError
from isoshard.core.layout.offload import (
    in_memory,
    is_offloaded,
    on_device,
    to_device,
    to_device_after,
    to_memory_of,
)
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.resolved import ResolvedPlan
from tests.jax_faults import host_memory_of_the_cpu

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


@host_memory_of_the_cpu
def test_a_step_brings_in_and_puts_back(mesh):
    layout = resting(mesh)
    state = jax.device_put(jnp.arange(8.0), layout)

    @jax.jit
    def step(state, x):
        new = to_device_after(state, x)
        return to_memory_of(new * 2 + x, layout), to_device(x)

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
        with pytest.raises(PlanError, match=r"not 'a': 3.*pinned_host"):
            Plan(memory={"a": 3})
        with pytest.raises(PlanError, match=r"a: its devices \(cpu\) have no memory 'disk'"):
            Plan({"*": P()}, memory={"a": "disk"}).resolve({"a": (8,)}, mesh)


class TestVerbs:
    """`memory=` of `shard` and `reshard`."""

    def test_shard_and_reshard(self, mesh):
        struct = iso.shard(jax.ShapeDtypeStruct((8,), "float32"), mesh, P("x"), memory=HOST)
        assert struct.sharding.memory_kind == HOST
        on_device = iso.shard(jnp.ones((8, 4)), mesh, P("x"), memory=HOST)
        x = iso.shard(np.ones((8, 4), np.float32), mesh, P("x"), memory=HOST)
        assert x.sharding == on_device.sharding
        assert x.sharding == NamedSharding(mesh, P("x"), memory_kind=HOST)
        moved = iso.reshard(x, P(None, "y"))  # stays in its memory
        assert moved.sharding == NamedSharding(mesh, P(None, "y"), memory_kind=HOST)
        back = iso.reshard(moved, P("x"), memory="device")
        assert back.sharding == NamedSharding(mesh, P("x"))
        np.testing.assert_array_equal(back, np.ones((8, 4)))
        assert iso.reshard(back, x.sharding).sharding == x.sharding
        assert iso.sharding_of(x).memory_kind == HOST

    def test_trees_and_plans(self, mesh):
        tree = {"a": np.ones(8, np.float32), "b": [np.ones(8, np.float32)]}
        whole = iso.shard(tree, mesh, P("x"), memory=HOST)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(whole)} == {HOST}
        some = iso.shard(tree, mesh, Plan({"*": P("x")}, memory={"b.*": HOST}))
        assert [some["a"].sharding.memory_kind, some["b"][0].sharding.memory_kind] == [
            "device",
            HOST,
        ]
        moved = iso.reshard(some, P("y"))
        assert [moved["a"].sharding.memory_kind, moved["b"][0].sharding.memory_kind] == [
            "device",
            HOST,
        ]

    @host_memory_of_the_cpu
    def test_inside_jit(self, mesh):
        def step(x):
            return iso.shard(x * 2, mesh, P("x"), memory=HOST), iso.shard(x, mesh, P("x"))

        host, device = jax.jit(step)(iso.shard(np.ones(8, np.float32), mesh, P()))
        assert host.sharding.memory_kind == HOST and device.sharding.memory_kind == "device"
        np.testing.assert_array_equal(host, 2 * np.ones(8))

    @host_memory_of_the_cpu
    def test_torch(self, mesh):
        t = iso.shard(torch.ones(8, 4), mesh, P("x"), memory=HOST)
        assert iso.sharding_of(t).memory_kind == HOST
        assert iso.to_jax(t).sharding == NamedSharding(mesh, P("x"), memory_kind=HOST)
        assert iso.sharding_of(t + 1).memory_kind == "device"
        assert iso.sharding_of(iso.reshard(t, P(None, "y"))).memory_kind == HOST
        assert iso.sharding_of(iso.reshard(t, P("x"), memory="device")).memory_kind == "device"
        t.add_(1)
        assert iso.to_jax(t).sharding.memory_kind == HOST
        np.testing.assert_array_equal(t.tolist(), np.full((8, 4), 2))
        module = iso.shard(torch.nn.Linear(8, 8), mesh, Plan({"*": P("x")}), memory=HOST)
        assert {s.memory_kind for s in iso.sharding_of(module).values()} == {HOST}

    def test_refused(self, mesh):
        with pytest.raises(ShardingError, match=r"w: its devices \(cpu\) have no memory 'disk'"):
            iso.shard(np.ones(8, np.float32), mesh, P("x"), memory="disk", name="w")
        with pytest.raises(ShardingError, match=r"memory='pinned_host' with uneven='pad'"):
            iso.shard(np.ones(7, np.float32), mesh, P("x"), uneven="pad", memory=HOST)


def test_typeof(mesh):
    x = iso.shard(np.ones((8, 4), np.float32), mesh, P("x"))
    assert iso.sharding.typeof(x) == jax.typeof(x)
    resting = iso.shard(x, mesh, P("x"), memory=HOST)
    assert iso.sharding.typeof(iso.to_torch(resting)) == jax.typeof(resting)
    explicit = jax.make_mesh((2, 4), ("x", "y"))
    t = iso.shard(torch.ones(8, 4), explicit, P("x", "y"))
    assert str(iso.sharding.typeof(t)) == "float32[8@x,4@y]"
    assert str(iso.sharding.typeof(t @ t.T)) == "float32[8@x,8]"
    with pytest.raises(TypeError, match="typeof is not implemented for torch objects"):
        iso.sharding.typeof(torch.nn.Linear(2, 2))
    with pytest.raises(ShardingError, match="has no sharding"):
        iso.sharding.typeof(torch.ones(3))
