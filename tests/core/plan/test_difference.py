"""Differences and goldens: every leaf that changed, bytes, rules, meshes, files."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan, PlanError, ResolvedPlan

SHAPES = {
    "a.weight": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    "b.weight": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16),
    "norm": jax.ShapeDtypeStruct((32,), jnp.float32),
}
BEFORE = Plan({"a.*": P("tp"), "b.*": P("tp"), "norm": None})
AFTER = Plan({"a.*": P("tp", "fsdp"), "*.weight": P("tp"), "*": P("fsdp")})


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("fsdp", "tp"))


def test_what_changed(mesh):
    diff = BEFORE.diff(AFTER, SHAPES, mesh)
    assert diff
    assert [change.name for change in diff.changed] == ["a.weight", "norm"]
    assert [change.name for change in diff.renamed_rules] == ["b.weight"]
    assert diff.bytes_per_device == (2048 + 1024 + 128, 1024 + 1024 + 64)
    assert str(diff).splitlines() == [
        "name      spec                         bytes/device        rule",
        "a.weight  P('tp',) -> P('tp', 'fsdp')  2.0 KiB -> 1.0 KiB  a.*",
        "norm      P() -> P('fsdp',)            128 B -> 64 B       norm -> *",
        "2 of 3 leaves changed, 3.1 KiB -> 2.1 KiB on each device",
        "same sharding by another rule: b.weight: rule b.* -> *.weight",
    ]


def test_nothing_changed(mesh):
    diff = BEFORE.diff(BEFORE, SHAPES, mesh)
    assert not diff
    assert str(diff) == "0 of 3 leaves changed, 3.1 KiB on each device"


def test_other_leaves_and_another_mesh(mesh):
    fewer = {name: SHAPES[name] for name in ("a.weight", "b.weight")}
    diff = BEFORE.resolve(SHAPES, mesh).diff(
        BEFORE.resolve(fewer, make_mesh((1, 8), ("fsdp", "tp")))
    )
    assert [str(change) for change in diff.changed] == [
        "a.weight: bytes 2.0 KiB -> 1.0 KiB",
        "b.weight: bytes 1.0 KiB -> 512 B",
        "norm: only before",
    ]
    assert "norm      P() -> (no such leaf)" in str(diff)
    assert "mesh {'fsdp': 2, 'tp': 4} -> {'fsdp': 1, 'tp': 8}" in str(diff)


def test_json_goes_there_and_back(mesh):
    plan = Plan({"a.*": P(("fsdp", "tp"))}, activations={"a": P("fsdp")})
    resolved = plan.resolve(SHAPES, mesh)
    read = ResolvedPlan.from_json(resolved.to_json())
    assert isinstance(read.mesh, AbstractMesh)
    assert read.specs == resolved.specs
    assert read.bytes_per_device == resolved.bytes_per_device
    assert (read.unused, read.activations) == (resolved.unused, resolved.activations)
    assert read.to_json() == resolved.to_json()
    assert str(read) == str(resolved)
    assert len(json.loads(resolved.to_json())["leaves"]) == 3
    noted = Plan({"norm": ("x",)}, axes={"x": "pod"}).resolve({"norm": (32,)}, mesh)
    assert ResolvedPlan.from_json(noted.to_json()).leaves[0].notes == noted.leaves[0].notes


def test_a_golden_names_every_difference(mesh, tmp_path):
    path = tmp_path / "gpt2.json"
    before = BEFORE.resolve(SHAPES, mesh)
    with pytest.raises(PlanError, match=r"no golden file .*gpt2\.json; .*write it: path\.write"):
        before.check_golden(path)
    path.write_text(before.to_json())
    before.check_golden(path)
    before.check_golden(str(path))
    with pytest.raises(PlanError) as caught:
        AFTER.resolve(SHAPES, mesh).check_golden(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the layout is not that of {path}:"
    assert lines[1:-1] == [
        "  a.weight: spec P('tp',) -> P('tp', 'fsdp'), bytes 2.0 KiB -> 1.0 KiB",
        "  norm: spec P() -> P('fsdp',), bytes 128 B -> 64 B, rule norm -> *",
        "  b.weight: rule b.* -> *.weight",
    ]
    other = make_mesh((4, 2), ("fsdp", "tp"))
    with pytest.raises(PlanError, match=r"mesh: \{'fsdp': 2, 'tp': 4\} -> \{'fsdp': 4"):
        BEFORE.resolve(SHAPES, other).check_golden(path)
    with pytest.raises(PlanError, match=r"unused rules: \(\) -> \('typo',\)"):
        Plan({**dict(BEFORE.rules), "typo": None}).resolve(SHAPES, mesh).check_golden(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"mesh": {"x": 2}}', '{"mesh": [1], "leaves": []}'])
def test_text_that_is_no_golden(text):
    with pytest.raises(PlanError, match=r"not JSON that ResolvedPlan\.to_json wrote"):
        ResolvedPlan.from_json(text)
