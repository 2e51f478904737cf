"""The safetensors benchmark: its contestants read the same, and a run says what it should."""

import numpy as np

from benchmarks import safetensors


def test_the_contestants_agree(tmp_path):
    size = safetensors.write_model(tmp_path, safetensors.LAYER)
    assert size == safetensors.LAYER
    ours, theirs = safetensors.load_ours(tmp_path), safetensors.load_by_library(tmp_path)
    assert sorted(ours) == sorted(theirs)
    for name in ours:
        assert ours[name].sharding == theirs[name].sharding
        assert np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes()
    raw = safetensors.read_raw(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        chunks = [raw[key] for key in sorted(raw) if key[0] == path]
        assert path.read_bytes() == b"".join(chunk.tobytes() for chunk in chunks)
