"""The axes kept in metadata, and metadata that is no such thing."""

import onnx
import pytest

from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.reading.mesh_record import MeshRecord, read_mesh, write_mesh


def test_one_record_per_configuration_and_the_last_counts():
    model = onnx.ModelProto()
    for size in (2, 4):
        write_mesh(model, "a", MeshRecord((("x", size),)))
    write_mesh(model, "b", MeshRecord((("y", 8),), "y"))
    assert read_mesh(model, "a") == MeshRecord((("x", 4),))
    assert read_mesh(model, "b").stage_axis == "y"
    assert len(model.metadata_props) == 2


@pytest.mark.parametrize(("text", "match"), [
    ("", "cannot be read"),
    ("[]", "cannot be read"),
    ('{"axes": 3}', "cannot be read"),
    ('{"axes": [["x"]]}', "cannot be read"),
    ('{"axes": []}', "describes no mesh"),
    ('{"axes": [["x", 2], ["x", 2]]}', "describes no mesh"),
    ('{"axes": [["x", 2]], "stage_axis": "s"}', "describes no mesh"),
    ('{"axes": [["x", 0]]}', "axis of size 0"),
    ("[" * 100000, "cannot be read"),
])  # fmt: skip
def test_malformed_records(text, match):
    model = onnx.ModelProto()
    model.metadata_props.add(key="isoshard.mesh.a", value=text)
    with pytest.raises(ModelError, match=rf"metadata 'isoshard.mesh.a' .*{match}|{match}"):
        read_mesh(model, "a")
