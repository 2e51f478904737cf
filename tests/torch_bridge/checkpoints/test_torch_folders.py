"""Folders of torch.distributed.checkpoint through `iso.save` and `iso.restore`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed import checkpoint as dcp

import isoshard as iso
from isoshard.core.checkpoint import opened
from isoshard.core.errors import CheckpointError
from isoshard.torch_bridge.checkpoints import CheckpointManager, SPMDSavePlanner

W = torch.arange(32 * 16, dtype=torch.float32).reshape(32, 16)


@pytest.fixture(autouse=True)
def quiet():
    """torch tells that one process suffices, each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield


@pytest.fixture
def state(mesh):
    return {
        "model": {
            "w": iso.shard(W, mesh, P("x", "y")),
            "ids": torch.arange(4),
            "b": W[0].bfloat16(),
        },
        "epoch": 3,
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}],
        "name": "run",
    }


def like(sharding=None):
    return {
        "model": {
            "w": jax.ShapeDtypeStruct((32, 16), "float32", sharding=sharding),
            "ids": np.zeros(4, np.int64),
            "b": torch.zeros(16, dtype=torch.bfloat16),
        },
        "epoch": 0,
        "groups": [{"lr": 0.0, "betas": (0.0, 0.0)}],
        "name": "",
    }


def check(found):
    assert (np.asarray(found["model"]["w"]) == W.numpy()).all()
    assert found["model"]["ids"].tolist() == [0, 1, 2, 3]
    assert (found["model"]["b"] == W[0].bfloat16()).all()
    assert (found["epoch"], found["name"]) == (3, "run")
    assert found["groups"] == [{"lr": 0.5, "betas": (0.9, 0.99)}]


def test_what_torch_wrote(tmp_path, state):
    dcp.save(state, checkpoint_id=tmp_path, planner=SPMDSavePlanner())
    laid = NamedSharding(iso.make_mesh((4, 2), ("x", "y")), P("x", "y"))
    wanted = like(laid)
    wanted["groups"][0]["betas"] = (0.0, 0.0)
    known = set(opened(tmp_path).entries)
    assert {"model.w", "epoch", "groups.0.lr"} <= known
    found = iso.restore(tmp_path, {**wanted, "groups": [{"lr": 0.0}]}, partial=True)
    assert found["model"]["w"].sharding == laid and found["groups"] == [{"lr": 0.5}]
    check({**found, "groups": state["groups"]})


def test_what_torch_reads(tmp_path, state):
    iso.save(tmp_path, state, step=5, format="torch")
    check(iso.restore(tmp_path, like()))
    back = {
        "model.w": torch.zeros(32, 16),
        "model.ids": torch.zeros(4, dtype=torch.int64),
        "epoch": 0,
    }
    dcp.load(back, checkpoint_id=tmp_path / "5")
    assert (back["model.w"] == W).all() and back["epoch"] == 3
    assert back["model.ids"].tolist() == [0, 1, 2, 3]
    file = tmp_path / "5" / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was altered"):
        iso.restore(tmp_path, like())


def test_ours_and_jax_arrays_in_torch_s_format(tmp_path, mesh):
    laid = iso.shard(np.ones((8, 4), np.float32), mesh, P("y", "x"))
    iso.save(tmp_path, {"a": laid, "b": jnp.arange(3)}, format="torch")
    found = iso.restore(tmp_path, {"a": torch.zeros(8, 4), "b": jnp.zeros(3, jnp.int32)})
    assert found["a"].sum() == 32 and found["b"].tolist() == [0, 1, 2]


def test_a_manager_s_checkpoints(tmp_path, state):
    with CheckpointManager(tmp_path, 10, chkpt_on_preemption=False) as manager:
        manager.save(10, {**state, "epoch": 2})
        manager.save(20, state)
    assert iso.latest(tmp_path) == 20
    wanted = {"model": like()["model"], "epoch": 0}
    assert iso.restore(tmp_path, wanted, partial=True)["epoch"] == 3
    assert iso.restore(tmp_path, wanted, step=10, partial=True)["epoch"] == 2


def test_a_module_and_optimizer_by_state_dict(tmp_path):
    model = torch.nn.Linear(8, 4)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    again = torch.nn.Linear(8, 4)
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    iso.restore(tmp_path, {"model": again}, mesh=mesh, plan=P("y"))
    assert again.weight.partition_spec == P("y")
    assert (again.weight.cpu() == model.weight).all()


class Odd:
    """Something that is pickled by reference."""


def test_what_does_not_fit(tmp_path):
    dcp.save({"w": W, "odd": Odd(), "n": 1}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError) as caught:
        iso.restore(tmp_path, {"w": torch.zeros(4), "odd": 1, "x": 2})
    lines = str(caught.value).splitlines()[1:]
    assert lines[0].startswith("  odd: a pickled object that is not loaded by default")
    assert lines[1:] == [
        "  w: shape (32, 16) in the checkpoint, (4,) in `like`",
        "  x: not in the checkpoint (leave it out of `like`, or map its name with weights=..)",
        "  n: in the checkpoint, and not in `like` (partial=True leaves such leaves out)",
    ]
    assert iso.restore(tmp_path, {"n": 0}, partial=True) == {"n": 1}


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [0, 100])
def test_truncated_files(tmp_path, file, size):
    dcp.save({"w": W}, checkpoint_id=tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=rf"{file} (cannot be read|ends \d+ bytes too early)"):
        iso.restore(tmp_path, {"w": torch.zeros(32, 16)})
    path.unlink()
    with pytest.raises(CheckpointError, match=r"is missing|no checkpoint at"):
        iso.restore(tmp_path, {"w": torch.zeros(32, 16)})
