"""Saving: names, steps, what is refused, and saves that go on beside what follows."""

import logging
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.checkpoint import opened, zarr_format
from isoshard.core.checkpoint.store import LocalStore
from isoshard.core.errors import CheckpointError, ShardingError
from isoshard.core.installation import install_command
from isoshard.core.layout.uneven import UnevenArray


def tree(number):
    return {"w": np.full((64, 64), number, np.float32), "n": number}


def test_steps(tmp_path):
    assert iso.latest(tmp_path) is None and iso.latest(tmp_path / "nothing") is None
    for step in (10, 30, 20):
        saving = iso.save(tmp_path / "run", tree(step), step=step, keep=2)
        assert saving.step == step and saving.done
    run = tmp_path / "run"
    assert iso.latest(run) == 20  # what was saved last
    assert sorted(path.name for path in run.iterdir()) == ["20", "30"]
    assert iso.restore(run, tree(0))["n"] == 20
    assert iso.restore(run, tree(0), step=30)["n"] == 30
    assert iso.restore(run / "30", tree(0))["n"] == 30
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 10 .* steps \[20, 30\]"):
        iso.restore(run, tree(0), step=10)
    with pytest.raises(ValueError, match="is a checkpoint itself; give the folder"):
        iso.save(run / "30", tree(1))


def test_names_are_paths_and_files_are_zarr(tmp_path):
    values = np.arange(2048.0).reshape(32, 64)
    iso.save(tmp_path, {"a": [{"../b c/é": values}], "b": {7: np.ones(2)}})
    assert set(opened(tmp_path).entries) == {"a.0.../b c/é", "b.7"}
    import tensorstore

    (folder,) = (tmp_path / "0" / "arrays").iterdir()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    assert (tensorstore.open(spec).result().read().result() == values).all()


def test_small_and_empty_arrays(tmp_path, mesh):
    values = {
        "scalar": jnp.float32(3),
        "empty": np.zeros((0, 4)),
        "none_on_devices": iso.shard(np.zeros((0, 8), np.float32), mesh, P(None, "y")),
        "few": iso.shard(np.arange(8.0, dtype=np.float32), mesh, P(("x", "y"))),
        "flag": np.bool_(True),
    }
    iso.save(tmp_path, values)
    assert not list((tmp_path / "0" / "arrays").iterdir())
    found = iso.restore(tmp_path, jax.tree.map(lambda a: a, values))
    for name, a in values.items():
        assert found[name].shape == a.shape and found[name].dtype == a.dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(a).tobytes()
    assert found["few"].sharding == values["few"].sharding


def test_nothing_is_gathered_or_copied(tmp_path, mesh, counted):
    values = {"w": iso.shard(np.ones((64, 64), np.float32), mesh, P("x", "y"))}
    before = counted("copies")
    iso.save(tmp_path, values)
    assert counted("copies") == before and counted("gathers") == 0
    iso.save(tmp_path, values, asynchronous=True).wait()
    assert counted("copies") == before + 8 and counted("gathers") == 0


def test_what_cannot_be_saved_is_all_named(tmp_path):
    deleted = jnp.ones(4)
    deleted.delete()
    uneven = UnevenArray(jnp.zeros(8), (6,), ((2, 2, 1, 1),))
    keys = UnevenArray(jax.random.split(jax.random.key(0), 4), (3,), ((1, 2),))
    bad = {
        "f": print,
        "nested": [object()],
        "deleted": deleted,
        "uneven": uneven,
        "keys": keys,
        "objects": np.array([None]),
    }
    with pytest.raises(TypeError) as caught:
        iso.save(tmp_path, {"w": np.ones(3), **bad})
    told = str(caught.value)
    for text in (
        "\n  f: builtin_function_or_method",
        "\n  nested.0: object",
        "\n  deleted: a jax.Array that was donated",
        "\n  uneven: an UnevenArray of shape (6,) on no mesh; shard it first: iso.reshard",
        "\n  keys: random keys in blocks of unequal sizes; give iso.full",
        "\n  objects: a NumPy array of dtype object",
        "obj.state_dict()",
    ):
        assert text in told
    assert "\n  w:" not in told
    with pytest.raises(TypeError, match="w: a traced value; save outside jit"):
        jax.jit(lambda w: iso.save(tmp_path, {"w": w}) and w)(jnp.ones(2))
    one = jax.ShapeDtypeStruct((4,), "float32")
    with pytest.raises(ShardingError, match=r"(?s)2 leaves.*a is only the shape.*b is only"):
        iso.save(tmp_path, {"a": one, "b": jax.ShapeDtypeStruct((3,), "float32")})
    with pytest.raises(ValueError, match=r"keys of a dictionary .* not supported between"):
        iso.save(tmp_path, {"a": 1, 7: 2})
    with pytest.raises(ValueError, match=r"several leaves are called 'a\.b'"):
        iso.save(tmp_path, {"a.b": np.ones(3), "a": {"b": np.ones(3)}})
    assert not (tmp_path / "0").exists()


def test_wrong_arguments(tmp_path):
    for arguments, message in (
        ({"step": -1}, "step is an integer of at least 0, not -1"),
        ({"step": True}, "step is an integer"),
        ({"keep": 1.5}, "keep is an integer of at least 0, not 1.5"),
        ({"format": "hdf5"}, "format is 'zarr', 'torch' or 'orbax', not 'hdf5'"),
        ({"format": "torch", "asynchronous": True}, "'torch' iso.save writes at once"),
    ):
        with pytest.raises(ValueError, match=message):
            iso.save(tmp_path, tree(1), **arguments)
    for verb in (lambda: iso.save("gs://bucket/run", {}), lambda: iso.restore("s3://x", {})):
        with pytest.raises(ValueError, match=r"is a URL.*CheckpointManager"):
            verb()


class Gate:
    """Holds the background thread before it writes arrays."""

    def __init__(self, monkeypatch):
        self._open = threading.Event()
        real = zarr_format.write_arrays

        def held(*args, **kwargs):
            assert self._open.wait(60)
            return real(*args, **kwargs)

        monkeypatch.setattr(zarr_format, "write_arrays", held)

    def open(self):
        self._open.set()


def test_an_asynchronous_save_has_what_was_there(tmp_path, mesh, monkeypatch):
    gate = Gate(monkeypatch)
    host = np.arange(4096.0).reshape(64, 64)
    laid = iso.shard(np.ones((64, 64), np.float32), mesh, P("x", "y"))
    small = np.arange(4)
    saving = iso.save(tmp_path, {"h": host, "d": laid, "s": small}, asynchronous=True)
    assert not saving.done and iso.latest(tmp_path) is None
    host[:] = small[:] = 0
    changed = jax.jit(lambda a: a * 2, donate_argnums=0)(laid)
    assert laid.is_deleted() and changed.sum() == 8192
    gate.open()
    saving.wait()
    like = {"h": np.zeros((64, 64)), "d": changed, "s": np.zeros(4, np.int64)}
    found = iso.restore(tmp_path, like)
    assert found["h"][-1, -1] == 4095 and found["d"].sum() == 4096
    assert found["s"].tolist() == [0, 1, 2, 3]


def test_saves_to_one_path_come_one_after_the_other(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    first = iso.save(tmp_path, tree(1), step=1, asynchronous=True)
    second = iso.save(tmp_path, tree(2), step=2, asynchronous=True)
    assert not first.done and not second.done
    gate.open()
    iso.save(tmp_path, tree(3), step=3)
    assert first.done and second.done
    assert [iso.restore(tmp_path, tree(0), step=n)["n"] for n in (1, 2, 3)] == [1, 2, 3]


def test_a_failure_in_the_background_is_told(tmp_path, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    iso.save(tmp_path, tree(1))
    with monkeypatch.context() as patched:
        patched.setattr(zarr_format, "write_arrays", refuse)
        saving = iso.save(tmp_path, tree(2), step=2, asynchronous=True)
        with pytest.raises(OSError, match="No space left"):
            saving.wait()
        assert "checkpoint of step 2" in caplog.text and "No space left" in caplog.text
        with caplog.at_level(logging.CRITICAL):
            forgotten = iso.save(tmp_path, tree(3), step=3, asynchronous=True)
            threading.Event().wait(0.01)
            while not forgotten.done:
                threading.Event().wait(0.01)
    with pytest.raises(
        CheckpointError, match=r"no wait\(\) has raised.*step 3: OSError.*No space left"
    ):
        iso.save(tmp_path, tree(4), step=4)
    iso.save(tmp_path, tree(5), step=5)  # told once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "5"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(5, "Input/output error")

    iso.save(tmp_path, tree(1))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(LocalStore, "sync_folder", refuse)
        iso.save(tmp_path, tree(2))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert iso.restore(tmp_path, tree(0))["n"] == 1


def test_a_save_outlives_the_end_of_the_script(tmp_path):
    code = f"""
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import isoshard as iso
iso.save({str(tmp_path)!r}, {{"w": np.ones((512, 512))}}, asynchronous=True)
import sys
assert "torch" not in sys.modules and "flax" not in sys.modules
assert "orbax" not in sys.modules
iso.Plan({{"*": None}})
assert not [name for name in sys.modules if "plan_search" in name]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert iso.restore(tmp_path, {"w": np.zeros((512, 512))})["w"].sum() == 512 * 512


def test_without_tensorstore(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=re.escape(install_command("checkpoint"))):
        iso.save(tmp_path, {"w": np.ones((64, 64))})
