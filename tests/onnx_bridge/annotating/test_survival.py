"""Annotations stay through what files go through."""

import onnx
import pytest
from google.protobuf import json_format, text_format
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import annotate, layout
from tests.onnx_bridge.models import mlp


@pytest.fixture
def annotated():
    mesh = make_mesh((2, 2), ("data", "model"))
    specs = {"x": P("data"), "w0": P(None, "model"), "w1": P("model"), "y*": P("data")}
    return annotate(mlp(batch="n"), mesh, specs, {"*0": 0, "*1": 1})


def saved(model, path):
    onnx.save_model(model, path)
    return onnx.load_model(path)


def with_external_data(model, path):
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    return onnx.load_model(path)


def weights_left_outside(model, path):
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    return onnx.load_model(path, load_external_data=False)


def as_json(model, path):
    return json_format.Parse(json_format.MessageToJson(model), onnx.ModelProto())


def as_text(model, path):
    return text_format.Parse(text_format.MessageToString(model), onnx.ModelProto())


def as_onnx_json(model, path):
    onnx.save_model(model, path, format="json")
    return onnx.load_model(path, format="json")


def inferred(model, path):
    return onnx.shape_inference.infer_shapes(model)


WAYS = (saved, with_external_data, weights_left_outside, as_json, as_text, as_onnx_json, inferred)


@pytest.mark.parametrize("way", WAYS)
def test_the_layout_is_the_same(annotated, way, tmp_path):
    found = layout(way(onnx.ModelProto.FromString(annotated.SerializeToString()), tmp_path / "m"))
    expected = layout(annotated)
    assert found.shardings == expected.shardings
    assert found.parameters == expected.parameters
    assert str(found) == str(expected)


def test_the_messages_are_the_same(annotated, tmp_path):
    for way in (saved, as_json, as_text, as_onnx_json):
        assert way(annotated, tmp_path / way.__name__) == annotated
