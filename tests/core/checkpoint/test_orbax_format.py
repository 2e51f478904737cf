"""Orbax's checkpoints: we read what Orbax wrote, and Orbax reads what we write for it."""

from __future__ import annotations

import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.checkpoint import opened
from isoshard.core.errors import CheckpointError


@pytest.fixture
def tree(mesh):
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    params = {"w": iso.shard(weight, mesh, P("x", "y")), "l": [jnp.ones(3, jnp.bfloat16)]}
    return {
        "state": TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)),
        "key": jax.random.key(7),
        "small": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "host": np.arange(5),
        "numbers": (1, 0.5, True),
        "name": "run",
    }


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return (leaf.dtype, np.asarray(leaf).tobytes()) if hasattr(leaf, "dtype") else leaf


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, wanted)


def test_what_orbax_wrote(tree, tmp_path, mesh):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
    found = iso.restore(tmp_path / "run", tree)
    assert_same(found, tree)
    assert found["state"].params["w"].sharding == tree["state"].params["w"].sharding
    entry = opened(tmp_path / "run").entries["state.params.w"]
    assert (entry.shape, entry.dtype, entry.spec) == ((8, 8), "float32", (("x",), ("y",)))


def test_on_another_mesh_each_device_reads_its_own(tree, tmp_path, counted):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"w": tree["state"].params["w"]})
    other = iso.make_mesh((4, 2), ("a", "b"))
    like = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    found = iso.restore(tmp_path / "run", like, mesh=other, plan=P("b", "a"))["w"]
    assert found.sharding.spec == P("b", "a") and found.sharding.mesh == other
    assert_same({"w": found}, {"w": tree["state"].params["w"]})
    assert counted("gathers") == 0


def test_a_manager_s_steps_and_items(tree, tmp_path):
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave({"w": tree["host"] + step}))
    like = {"w": tree["host"]}
    for step, path in ((12, "one"), (12, "one/12"), (3, "one/3"), (3, "one/3/default")):
        assert (iso.restore(tmp_path / path, like)["w"] == tree["host"] + step).all()
    assert (iso.restore(tmp_path / "one", like, step=3)["w"] == tree["host"] + 3).all()
    unfinished = tmp_path / "one" / "20.orbax-checkpoint-tmp"  # a process ended while it wrote
    shutil.copytree(tmp_path / "one" / "12", unfinished)
    assert (iso.restore(tmp_path / "one", like)["w"] == tree["host"] + 12).all()
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 4"):
        iso.restore(tmp_path / "one", like, step=4)

    with ocp.CheckpointManager(tmp_path / "named") as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree), extra=ocp.args.JsonSave({"epoch": 1})
        )
        manager.save(5, args=items)
    assert_same(iso.restore(tmp_path / "named", tree), tree)

    with ocp.CheckpointManager(tmp_path / "two") as manager:
        both = ocp.args.Composite(a=ocp.args.PyTreeSave(like), b=ocp.args.PyTreeSave(like))
        manager.save(5, args=both)
    with pytest.raises(CheckpointError, match=r"with 2 trees of arrays \(a, b\); give the folder"):
        iso.restore(tmp_path / "two", like)
    assert (iso.restore(tmp_path / "two" / "5" / "b", like)["w"] == like["w"]).all()


@pytest.mark.parametrize("options", [{"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_its_other_layouts_of_files(tree, tmp_path, options):
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "run", args=ocp.args.PyTreeSave(tree["state"].params))
    assert_same(iso.restore(tmp_path / "run", tree["state"].params), tree["state"].params)


def test_a_model_of_nnx(tmp_path, mesh):
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", nnx.state(model))
    other = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    iso.restore(tmp_path / "run", other, mesh=mesh, plan=iso.Plan({"kernel": P(None, "y")}))
    assert (other.kernel[...] == model.kernel[...]).all()
    assert other.kernel[...].sharding.spec == P(None, "y")


def test_what_is_missing_is_named(tree, tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"w": tree["host"], "epoch": 3})
    with pytest.raises(CheckpointError, match=r"b: not in the checkpoint[\s\S]*epoch: in the"):
        iso.restore(tmp_path / "run", {"w": tree["host"], "b": tree["host"]})
    for file in (tmp_path / "run" / "d").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="is missing or altered"):
        iso.restore(tmp_path / "run", {"w": tree["host"], "epoch": 3})
    (tmp_path / "run" / "_METADATA").write_text('{"tree_meta')
    with pytest.raises(CheckpointError, match="_METADATA was truncated or altered"):
        iso.restore(tmp_path / "run", {"w": tree["host"], "epoch": 3})


def test_what_orbax_reads(tree, tmp_path):
    for step in (7, 9, 11):
        iso.save(tmp_path, tree, step=step, keep=2, format="orbax")
    assert iso.latest(tmp_path) == 11
    with ocp.CheckpointManager(tmp_path) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([9, 11], 11)
        arguments = ocp.checkpoint_utils.construct_restore_args(tree)
        found = manager.restore(9, args=ocp.args.PyTreeRestore(tree, restore_args=arguments))
    assert_same(found, tree)
    assert found["state"].params["w"].sharding == tree["state"].params["w"].sharding
    assert_same(iso.restore(tmp_path, tree), tree)
    with (tmp_path / "11" / "default" / "_METADATA").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match="is damaged, and nothing was restored"):
        iso.restore(tmp_path, tree)


def test_modules_as_dictionaries_of_their_parts(tmp_path):
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    iso.save(tmp_path, {"model": model}, format="orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        told = checkpointer.metadata(tmp_path / "0" / "default").item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), told)
        found = checkpointer.restore(tmp_path / "0" / "default", restore_args=arguments)
    assert (found["model"]["kernel"] == model.kernel[...]).all()


def test_what_orbax_has_no_place_for(tmp_path, mesh):
    uneven = iso.shard(np.arange(10.0, dtype=np.float32), mesh, P("y"), uneven="pad")
    wrong = {"b": b"x", "c": 1j, "e": np.zeros((0, 3)), "u": uneven}
    pattern = r"b: bytes\n  c: complex\n  u: blocks of unequal sizes\n  e: no elements"
    with pytest.raises(TypeError, match=pattern):
        iso.save(tmp_path / "run", wrong, format="orbax")
    with pytest.raises(ValueError, match="at once and from one process; Orbax's own"):
        iso.save(tmp_path / "run", {"a": 1}, format="orbax", asynchronous=True)
    assert not (tmp_path / "run").exists()


def test_reading_needs_no_orbax(tree, tmp_path, monkeypatch):
    iso.save(tmp_path, {"w": tree["host"]}, format="orbax")
    for name in [one for one in sys.modules if one.partition(".")[0] == "orbax"]:
        monkeypatch.setitem(sys.modules, name, None)
    found = iso.restore(tmp_path, {"w": np.zeros(5, np.int64)})
    assert found["w"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
        iso.save(tmp_path / "x", {"a": 1}, format="orbax")
