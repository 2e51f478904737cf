"""Which meshes a machine may be used as."""

from __future__ import annotations

import jax
import pytest

from isoshard.core.errors import ShardingError
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.mesh_shapes import meshes_for


def shapes(where: object, experts: int = 1) -> list[dict[str, int]]:
    return [dict(mesh.shape) for mesh in meshes_for(where, experts)]


@pytest.mark.parametrize("text", ["v5e:2x4", "v5p:8x8x8", "v5e:2*16x16"])
def test_all_devices_are_used_by_few_shapes(text):
    machine = topology(text)
    found = shapes(text)
    assert 2 <= len(found) <= 8
    assert found[0] == {"data": machine.size}
    assert all(one["data"] * one.get("model", 1) == machine.size for one in found)
    assert {"data": 8, "model": 8} in shapes("h100:8x8")  # a host is one of the widths
    assert {"data": 2, "expert": 8, "model": 16} in shapes("v5e:16x16", 8)


def test_a_mesh_is_itself_and_a_number_means_devices():
    mesh = topology("v5e:2x4").mesh((2, 4), ("a", "b"))
    assert meshes_for(mesh) == [mesh]
    here = meshes_for(8)[0]
    assert here.devices.tolist() == jax.devices()[:8]
    assert meshes_for(64)[0].devices.flat[0].platform == "cpu"


@pytest.mark.parametrize("where", [0, -4, None, 2.5])
def test_anything_else_is_refused(where):
    with pytest.raises(ShardingError, match="neither a mesh, a topology such as 'v5e:16x16', nor"):
        meshes_for(where)
