"""Saving: what the format's own library reads, from shards."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from isoshard.core.transfer.device_put import shard
from isoshard.core.weights import FileFormatError, load_safetensors, save_safetensors


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("spec", [("x",), ("y", "x"), (None, ("x", "y"))])
def test_the_library_reads_it(tmp_path, mesh, spec, counted):
    weights = {"a": random(8, 16), "b": random(16, 8).astype(jnp.bfloat16)}
    [file] = save_safetensors(tmp_path / "out", shard(weights, mesh, spec))
    assert file.name == "model.safetensors"
    found = safetensors.numpy.load_file(file)
    for name in weights:
        assert found[name].tobytes() == weights[name].tobytes()
    assert counted("gathers") == 0


def test_blocks_of_rows(tmp_path, mesh, monkeypatch):
    from isoshard.core.weights import safetensors_writing as saving

    monkeypatch.setattr(saving, "CHUNK", 100)
    w = random(16, 8)
    [file] = save_safetensors(tmp_path / "w.safetensors", {"w": shard(w, mesh, ("y", "x"))})
    assert safetensors.numpy.load_file(file)["w"].tobytes() == w.tobytes()


def test_a_folder_with_an_index(tmp_path, mesh):
    weights = {f"w.{i}": random(8, 8) for i in range(5)}
    files = save_safetensors(tmp_path, weights, max_shard_size=600)
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 5 * 256}
    assert index["weight_map"]["w.4"] == "model-00003-of-00003.safetensors"
    loaded = load_safetensors(tmp_path, mesh, ("x", "y"))
    for name, w in weights.items():
        np.testing.assert_array_equal(loaded[name], w)


def test_a_tied_weight_is_written_once(tmp_path, mesh):
    w = jnp.ones((8, 8))
    [file] = save_safetensors(tmp_path, {"a": w, "b": w, "c": w + 1})
    with safetensors.safe_open(file, "np") as opened:
        assert sorted(opened.keys()) == ["a", "c"]
        assert opened.metadata() == {"format": "pt", "b": "a"}
    loaded = load_safetensors(tmp_path, mesh, ("x",))
    assert loaded["a"] is loaded["b"]
    assert sorted(loaded) == ["a", "b", "c"]


def test_nothing_is_written_over(tmp_path):
    save_safetensors(tmp_path, {"a": random(2)})
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists already"):
        save_safetensors(tmp_path, {"a": random(2)})
    with pytest.raises(FileExistsError, match="exists already"):
        save_safetensors(tmp_path / "model.safetensors", {"a": random(2)})
    with pytest.raises(FileFormatError, match="a: complex128 has no code"):
        save_safetensors(tmp_path / "b.safetensors", {"a": np.ones(2, np.complex128)})
    [file] = save_safetensors(tmp_path / "c.safetensors", {"a": np.arange(3, dtype=">i4")})
    assert safetensors.numpy.load_file(file)["a"].tolist() == [0, 1, 2]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    from isoshard.core.weights import safetensors_writing as saving

    def fails(array):
        raise OSError("disk full")

    monkeypatch.setattr(saving, "_blocks", fails)
    with pytest.raises(OSError, match="disk full"):
        save_safetensors(tmp_path, {"a": random(2)})
    assert not list(tmp_path.iterdir())


def test_trees_and_scalars(tmp_path, mesh):
    tree = {"a": [jnp.float32(3), jnp.zeros((0, 4))], "b": jax.numpy.arange(8)}
    save_safetensors(tmp_path, shard(tree, mesh, None))
    loaded = load_safetensors(tmp_path, mesh, None)
    assert loaded["a.0"] == 3
    assert loaded["a.1"].shape == (0, 4)
    assert loaded["b"].tolist() == list(range(8))


def test_the_config_of_a_folder(tmp_path):
    w = {"w": np.ones((4, 4), np.float32)}
    save_safetensors(tmp_path / "a", w, config={"model_type": "mine", "layers": 2})
    assert json.loads((tmp_path / "a" / "config.json").read_text())["layers"] == 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="other settings"):
        save_safetensors(tmp_path / "b", w, config={"layers": 2})
    with pytest.raises(ValueError, match="written to a folder"):
        save_safetensors(tmp_path / "w.safetensors", w, config={})
    with pytest.raises(TypeError, match="a mapping or have to_dict"):
        save_safetensors(tmp_path / "c", w, config=3)
    for size in ("5 parts", 0, "iB", True):
        with pytest.raises(ValueError, match="max_shard_size must be"):
            save_safetensors(tmp_path / "c", w, max_shard_size=size)
    with pytest.warns(DeprecationWarning, match="max_shard_size"):
        assert len(save_safetensors(tmp_path / "d", w, max_file_bytes=10)) == 1
