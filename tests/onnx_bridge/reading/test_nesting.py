"""Graphs inside graphs: as deep as a file can have them, and deeper."""

import onnx
import pytest
from jax.sharding import PartitionSpec as P
from onnx import TensorProto, helper

import isoshard as iso
from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.reading.walking import DEEPEST

FLOAT = TensorProto.FLOAT


def nested(depth, kind=None):
    """A model of so many Ifs inside each other, built in place: protobuf could not copy it."""
    model = onnx.ModelProto(ir_version=11)
    model.opset_import.add(version=21)
    graph = model.graph
    graph.name = "main"
    graph.input.append(helper.make_tensor_value_info("x", FLOAT, [4]))
    graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    for level in range(depth, 0, -1):
        graph.output.append(helper.make_tensor_value_info(f"y{level}", FLOAT, [4]))
        node = graph.node.add(op_type="If", input=["c"], output=[f"y{level}"], name=f"if{level}")
        other = node.attribute.add(name="else_branch", type="GRAPH").g
        other.name = f"else{level}"
        other.node.add(op_type="Relu", input=["x"], output=[f"z{level}"])
        other.output.append(helper.make_tensor_value_info(f"z{level}", FLOAT, [4]))
        graph = node.attribute.add(name="then_branch", type="GRAPH").g
        graph.name = f"then{level}"
    graph.node.add(op_type="Identity", input=["x"], output=["y0"])
    graph.output.append(helper.make_tensor_value_info("y0", FLOAT, [4]))
    return model


def files(model, folder):
    yield model.SerializeToString()
    for suffix, kind in ((".json", "json"), (".textproto", "textproto")):
        path = folder / f"model{suffix}"
        path.write_bytes(onnx._get_serializer(kind, str(path)).serialize_proto(model))
        yield path


def test_as_deep_as_a_file_can_have_them(tmp_path, mesh):
    model = nested(DEEPEST)
    for source in (model, *files(model, tmp_path)):
        assert iso.onnx.load(source).graph.output[0].name == f"y{DEEPEST}"
    annotated = iso.onnx.annotate(model, mesh, {f"y{DEEPEST}": P("x")})
    assert iso.onnx.layout(annotated, mesh).outputs[f"y{DEEPEST}"].spec == P("x")


@pytest.fixture
def mesh():
    return iso.make_mesh((4,), ("x",))


DEEPER = [DEEPEST + 1, 60]


def annotated(deep, mesh):
    """A model of which a file says how it is sharded; its graph is another, in memory."""
    model = iso.onnx.annotate(nested(1), mesh, {"y1": P("x")})
    model.graph.CopyFrom(deep.graph)
    return model


VERBS = {
    "load": lambda model, mesh: iso.onnx.load(model),
    "annotate": lambda model, mesh: iso.onnx.annotate(model, mesh, {"y1": P("x")}),
    "layout": lambda model, mesh: iso.onnx.layout(annotated(model, mesh), mesh),
    "validate": lambda model, mesh: iso.onnx.validate(model),
    "compile": lambda model, mesh: iso.onnx.compile(model, mesh),
    "Graph": lambda model, mesh: iso.onnx.Graph(model).values,
}


@pytest.mark.parametrize("depth", [DEEPEST + 1, 2000])
@pytest.mark.parametrize("verb", VERBS)
def test_deeper_models_are_refused_where_they_are_opened(depth, verb, mesh):
    with pytest.raises(ModelError, match=rf"more than {DEEPEST} deep"):
        VERBS[verb](nested(depth), mesh)


def test_types_inside_types():
    """The depth of graphs says nothing of these."""
    model = nested(0)
    kind = model.graph.value_info.add(name="x9").type
    for _ in range(80):
        kind = kind.sequence_type.elem_type
    kind.tensor_type.elem_type = FLOAT
    model.graph.output[0].ClearField("type")
    with pytest.raises(ModelError, match="its types are nested too deeply"):
        iso.onnx.Graph(model).shape("y0")
    with pytest.raises(ModelError, match="nested too deeply"):
        iso.onnx.load(model.SerializeToString())
