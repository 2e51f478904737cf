"""Checkpoints and axis types: saved from one kind of mesh, restored onto any, with its types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.leaf_paths import named_leaves

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO)}
PLAN = iso.Plan({"*kernel": P("x", "y"), "*bias": P("y")})
VALUES = {
    "w": np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32),
    "b": np.arange(8, dtype=np.int32),
}
SPECS = {"w": P("x", "y"), "b": P("y")}


def mesh_of(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("x", "y"), axis_types=KINDS[kind])


def laid(mesh, values=VALUES):
    return iso.shard(values, mesh, SPECS) | {"key": iso.shard(jax.random.key(3), mesh, P())}


def zeros(mesh):
    return laid(mesh, {name: np.zeros_like(value) for name, value in VALUES.items()})


def check(found, mesh, specs=SPECS):
    for name, value in VALUES.items():
        assert found[name].sharding == NamedSharding(mesh, specs[name]), name
        assert np.asarray(found[name]).tobytes() == value.tobytes(), name
    assert found["key"].sharding.mesh == mesh
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()


@pytest.fixture(params=["explicit"])
def saved(request, tmp_path, counted):
    """A checkpoint from a mesh of each kind; nothing is gathered for it."""
    state = laid(mesh_of(request.param))
    before = counted("gathers")
    iso.save(tmp_path, state)
    assert counted("gathers") == before
    return tmp_path


@pytest.mark.parametrize(
    ("saved", "kind", "shape"),
    [("auto", "explicit", (4, 2)), ("explicit", "mixed", (2, 4)), ("mixed", "auto", (4, 2))],
    indirect=["saved"],
)
def test_from_every_kind_to_every_kind(saved, kind, shape):
    mesh = mesh_of(kind, shape)
    like = zeros(mesh)
    check(iso.restore(saved, like), mesh)
    check(iso.restore(saved, zeros(mesh_of("auto")), mesh=mesh), mesh)
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in like.items()
    }
    check(iso.restore(saved, shapes), mesh)
    plan = iso.Plan({"w": P(None, "x"), "b": P("x")})
    check(iso.restore(saved, shapes, mesh=mesh, plan=plan), mesh, {"w": P(None, "x"), "b": P("x")})
    with jax.set_mesh(mesh):
        found = iso.restore(saved, shapes, plan=plan)
    check(found, mesh, {"w": P(None, "x"), "b": P("x")})


def test_shapes_over_an_abstract_mesh(saved):
    mesh = mesh_of("explicit")
    shapes = jax.eval_shape(lambda tree: tree, zeros(mesh))
    assert isinstance(shapes["w"].sharding.mesh, AbstractMesh)
    with jax.set_mesh(mesh):
        check(iso.restore(saved, shapes), mesh)
    other = mesh_of("mixed", (4, 2))
    check(iso.restore(saved, shapes, mesh=other), other)
    check(iso.restore(saved, shapes, mesh=other, plan=iso.Plan(SPECS)), other)
    message = (
        r"(?s)\n  b: .*P\('y'.* over the abstract mesh 'x' \(2\), 'y' \(4\).*\n  w: .*mesh=mesh"
    )
    with pytest.raises(iso.ShardingError, match=message):
        iso.restore(saved, shapes)
    with jax.set_mesh(other), pytest.raises(iso.ShardingError, match="has no devices"):
        iso.restore(saved, shapes)


@pytest.mark.parametrize(
    ("saved", "kind", "is_set"),
    [("auto", "explicit", True), ("explicit", "mixed", False)],
    indirect=["saved"],
)
def test_through_a_map(saved, kind, is_set):
    mesh = mesh_of(kind)
    like = zeros(mesh)
    like["turned"] = iso.shard(np.zeros((32, 16), np.float32), mesh, P("y", "x"))
    del like["w"]

    def turned(tree):
        picked = tree["w"][jnp.arange(16)]  # what JAX leaves open along Explicit axes
        return {"turned": picked.T, "b": tree["b"]}

    with jax.set_mesh(mesh if is_set else auto(mesh)):
        found = iso.restore(saved, like, weights=turned)
    assert found["turned"].sharding == NamedSharding(mesh, P("y", "x"))
    assert np.asarray(found["turned"]).tobytes() == VALUES["w"].T.tobytes()
    assert found["b"].sharding == NamedSharding(mesh, P("y"))


def test_modules_and_safetensors(tmp_path):
    mesh = mesh_of("explicit")
    model = iso.create_sharded(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh, PLAN)
    want = {name: np.asarray(x) for name, x in named_leaves(nnx.state(model))}
    iso.save(tmp_path / "a", {"model": model})
    iso.save_safetensors(tmp_path / "b.safetensors", {"model": model})
    for path, kind in (("a", "mixed"), ("b.safetensors", "explicit")):
        other = mesh_of(kind)
        like = iso.shard(nnx.Linear(16, 8, rngs=nnx.Rngs(1)), other, PLAN)
        assert iso.restore(tmp_path / path, {"model": like})["model"] is like
        fresh = nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
        with jax.set_mesh(other):
            iso.restore(tmp_path / path, {"model": fresh}, plan=PLAN)
        for module in (like, fresh):
            for name, array in named_leaves(nnx.state(module)):
                assert array.sharding.mesh == other
                assert np.asarray(array).tobytes() == want[name].tobytes()
