"""Restoring: where leaves go, what does not fit, and other formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import CheckpointError, ShardingError, SpecError

W = np.arange(32 * 16, dtype=np.float32).reshape(32, 16)


@pytest.fixture
def saved(tmp_path, mesh):
    """A checkpoint of a sharded array, a small one, and a number."""
    w = iso.shard(W, mesh, P("x", "y"))
    iso.save(tmp_path, {"w": w, "b": np.arange(16.0), "n": 3, "name": "run"})
    return tmp_path


def only(saved, like, **options):
    return iso.restore(saved, {"w": like}, partial=True, **options)["w"]


def test_places(saved, mesh):
    laid = NamedSharding(mesh, P(None, ("y", "x")))
    for like in (jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=laid), jax.device_put(W, laid)):
        found = only(saved, like)
        assert found.sharding == laid and (found == W).all()
    device = jax.devices()[3]
    found = only(saved, jax.device_put(W, device))
    assert found.devices() == {device} and found.committed
    found = only(saved, jax.ShapeDtypeStruct(W.shape, W.dtype))
    assert found.devices() == {jax.devices()[0]} and not found.committed
    assert isinstance(only(saved, W), np.ndarray)


def test_meshes_and_plans(saved):
    other = iso.make_mesh((4, 2), ("x", "y"))
    like = jax.ShapeDtypeStruct(W.shape, W.dtype)
    assert only(saved, like, mesh=other).sharding == NamedSharding(other, P("x", "y"))
    spec = P(None, "y")
    laid = jax.device_put(W, NamedSharding(iso.make_mesh((2, 4), ("x", "y")), spec))
    assert only(saved, laid, mesh=other).sharding == NamedSharding(other, spec)
    assert isinstance(only(saved, W, mesh=other), np.ndarray)
    found = only(saved, W, mesh=other, plan=iso.Plan({"w": P("y")}))
    assert found.sharding == NamedSharding(other, P("y")) and (found == W).all()
    with pytest.raises(SpecError, match=r"w: spec P.'x', 'y'.* does not fit: no mesh axis is"):
        only(saved, like, mesh=iso.make_mesh((8,), ("z",)))
    with pytest.raises(ShardingError, match=r"w.* 7 shards|w: .*7"):
        only(saved, like, mesh=iso.make_mesh((7,), ("x",), devices=jax.devices()[:7]), plan=P("x"))
    with pytest.raises(ShardingError, match=r"pass one: iso\.restore\(path, like, mesh=mesh, pl"):
        only(saved, like, plan=P("x"))


def test_every_leaf_at_fault_is_named(saved):
    like = {
        "w": np.zeros((16, 32), np.float32),
        "b": jnp.zeros(16),
        "n": "three",
        "name": np.zeros(3),
        "new": 1.0,
        "more": {"a": np.zeros(2)},
    }
    with pytest.raises(CheckpointError) as caught:
        iso.restore(saved, like)
    assert str(caught.value).splitlines() == [
        "the checkpoint does not fit `like`, and nothing was restored:",
        "  b: dtype float64 in the checkpoint, float32 in `like`",
        "  more.a: not in the checkpoint (leave it out of `like`, or map its name with weights=..)",
        "  n: int in the checkpoint, str in `like`",
        "  name: str in the checkpoint, float64[3] in `like`",
        "  new: not in the checkpoint (leave it out of `like`, or map its name with weights=..)",
        "  w: shape (32, 16) in the checkpoint, (16, 32) in `like`",
    ]
    with pytest.raises(CheckpointError) as caught:
        iso.restore(saved, {"b": np.zeros(16)})
    assert str(caught.value).splitlines()[1:] == [
        f"  {name}: in the checkpoint, and not in `like` (partial=True leaves such leaves out)"
        for name in ("w", "n", "name")
    ]


def test_a_module_that_does_not_fit_stays_as_it_is(tmp_path):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    iso.save(tmp_path, {"model": model})
    other = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(2)), nnx.Linear(8, 3, rngs=nnx.Rngs(3)))
    before = other.layers[0].kernel[...]
    with pytest.raises(CheckpointError) as caught:
        iso.restore(tmp_path, {"model": other})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  model.layers.1.bias",
        "  model.layers.1.kernel",
    ]
    assert (other.layers[0].kernel[...] == before).all()


def test_flax_modules_states_and_variables(tmp_path, mesh):
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(4)))
    plan = iso.Plan({"*.kernel": P("x", "y"), "*.bias": P("y")})
    iso.shard(model, mesh, plan)
    state = nnx.state(model)
    variable = nnx.Param(jnp.arange(4.0))
    iso.save(tmp_path, {"model": model, "state": state, "variable": variable})
    other = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(5)))
    like = {"model": other, "variable": nnx.Param(jnp.zeros(4))}
    like["state"] = nnx.state(
        nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(5)))
    )
    found = iso.restore(tmp_path, like, mesh=iso.make_mesh((4, 2), ("x", "y")), plan=plan)
    assert found["model"] is other and found["variable"] is like["variable"]
    assert (found["variable"][...] == jnp.arange(4.0)).all()
    assert found["state"] is not like["state"]
    for new in (nnx.state(other), found["state"]):
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            a, b = (jax.random.key_data(x) if x.dtype.name.startswith("key") else x for x in (a, b))
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    kernel = other.layers[0].kernel[...]
    assert kernel.sharding.spec == P("x", "y") and kernel.sharding.mesh.shape == {"x": 4, "y": 2}


def test_maps_of_any_kind(saved, mesh):
    def turned(tree):
        return {"kernel": tree["w"].T, "half": {"b": tree["w"][:16]}}

    laid = NamedSharding(iso.make_mesh((4, 2), ("x", "y")), P("x", "y"))
    like = {
        "kernel": jax.ShapeDtypeStruct((16, 32), "float32", sharding=laid),
        "half": {"b": np.zeros((16, 16), np.float32)},
    }
    with pytest.raises(ShardingError, match="b: float64 would lose precision"):
        iso.restore(saved, like, weights=turned)
    iso.save(saved, {"w": iso.shard(W, mesh, P("x", "y")), "n": 3}, step=2)
    found = iso.restore(saved, {**like, "n": 0}, weights=turned)
    assert found["kernel"].sharding == laid and (found["kernel"] == W.T).all()
    assert (found["half"]["b"] == W[:16]).all() and found["n"] == 3
    assert isinstance(found["half"]["b"], np.ndarray)
    with pytest.raises(CheckpointError, match=r"(?s)missing: not in.*half\.b: in the checkpoint"):
        iso.restore(saved, {"missing": W, "n": 0, "kernel": W.T}, weights=turned)
    found = iso.restore(saved, {"w": W, "n": 0}, weights={})
    assert (found["w"] == W).all()
    with pytest.raises(TypeError, match=r"dictionary of those by branch; got a str"):
        iso.restore(saved, like, weights={"w": "kernel"})


def test_safetensors(tmp_path):
    file = tmp_path / "model.safetensors"
    iso.save_safetensors(file, {"w": W, "deep.b": jnp.ones(16, "bfloat16"), "s": np.float32(2)})
    laid = NamedSharding(iso.make_mesh((4, 2), ("x", "y")), P("x", "y"))
    like = {
        "w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=laid),
        "deep": {"b": jnp.zeros(16, "bfloat16")},
        "s": np.float32(0),
    }
    for path in (file, tmp_path):
        found = iso.restore(path, like)
        assert (found["w"] == W).all() and found["w"].sharding == laid and found["s"] == 2
        assert (found["deep"]["b"] == 1).all()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*damaged|cut off"):
        iso.restore(file, like)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="it does not exist"):
        iso.restore(tmp_path / "nothing", {})
    with pytest.raises(CheckpointError, match=r"neither one that iso.save wrote, nor safetensors"):
        iso.restore(tmp_path, {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*file"):
        iso.restore(tmp_path / "file", {})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3"):
        iso.restore(tmp_path, {}, step=3)


def test_a_later_format_is_refused(saved):
    import json
    import zlib

    from isoshard.core.checkpoint.steps import Manifest
    from isoshard.core.checkpoint.store import Sum

    path = saved / "0" / "tree.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    manifest = saved / "0" / ".manifest"
    found = Manifest.from_bytes(manifest.read_bytes(), "")
    data = path.read_bytes()
    files = {**found.files, "tree.json": Sum(len(data), zlib.crc32(data))}
    manifest.write_bytes(Manifest(found.step, found.order, files).to_bytes())
    with pytest.raises(CheckpointError, match="has format 2, and this version of isoshard reads"):
        iso.restore(saved, {})
