"""Configurations, node annotations, mesh records and stages, as the file has them."""

import onnx
import pytest
from onnx import helper

from isoshard.onnx_bridge import AnnotationError, Graph, ModelError
from isoshard.onnx_bridge.reading.annotations import choose, configurations, node_annotations
from isoshard.onnx_bridge.reading.mesh_record import MeshRecord, read_mesh, write_mesh
from isoshard.onnx_bridge.reading.stages import stages_of
from tests.onnx_bridge.models import FLOAT, mlp


def with_configurations(*names, devices=2):
    model = mlp()
    for name in names:
        model.configuration.add(name=name, num_devices=devices)
    return model


def test_several_need_a_name():
    model = with_configurations("tp", "dp")
    assert choose(model, "dp").name == "dp"
    with pytest.raises(AnnotationError, match="configurations 'tp', 'dp'; choose one"):
        choose(model)
    with pytest.raises(AnnotationError, match="no configuration 'pp'; there is 'tp', 'dp'"):
        choose(model, "pp")


@pytest.mark.parametrize(("names", "devices", "match"), [
    (("tp", "tp"), 2, "'tp' is there twice"),
    (("",), 2, "has no name"),
    (("tp",), 0, "'tp' has 0 devices"),
])  # fmt: skip
def test_configurations_that_are_none(names, devices, match):
    with pytest.raises(AnnotationError, match=match):
        configurations(with_configurations(*names, devices=devices))


def test_fewer_names_than_devices():
    model = onnx.ModelProto()
    model.configuration.add(name="tp", num_devices=2, device=["cpu:0"])
    with pytest.raises(AnnotationError, match="has 2 devices and names 1"):
        configurations(model)


def test_stage_zero_is_not_no_stage():
    model = with_configurations("tp")
    model.graph.node[0].device_configurations.add(configuration_id="tp", pipeline_stage=0)
    model.graph.node[1].device_configurations.add(configuration_id="tp")
    model.graph.node[2].device_configurations.add(configuration_id="other", pipeline_stage=3)
    found = node_annotations(model, "tp")
    assert {index: one.stage for index, one in found.items()} == {0: 0, 1: None}


def test_faults_of_nodes_are_collected():
    model = with_configurations("tp")
    first = model.graph.node[0].device_configurations.add(configuration_id="tp")
    first.sharding_spec.add(tensor_name="old/x")
    second = model.graph.node[1].device_configurations.add(configuration_id="tp")
    second.sharding_spec.add(tensor_name="b0")
    second.sharding_spec.add(tensor_name="b0")
    model.graph.node[2].device_configurations.add(configuration_id="tp")
    model.graph.node[2].device_configurations.add(configuration_id="tp")
    with pytest.raises(AnnotationError, match="3 annotations do not fit") as caught:
        node_annotations(model, "tp")
    told = str(caught.value)
    assert "node 'up0', tensor 'old/x': the node neither reads nor makes it" in told
    assert "node 'bias0', tensor 'b0': the tensor has two specs" in told
    assert "node 'relu0': it has 2 annotations" in told


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


def test_none_named_is_one_stage():
    assert set(stages_of(Graph(mlp()), {})) == {0}


def test_the_largest_among_the_makers():
    assert stages_of(Graph(mlp()), {0: 2, 3: 5}) == (2, 2, 2, 5, 5, 5)


def test_what_comes_before_goes_with_its_reader():
    """A chain on a weight alone, and the first nodes of a graph."""
    w = helper.make_tensor("w", FLOAT, [2, 2], [0.0] * 4)
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], name="turn"),
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("MatMul", ["a", "wt"], ["y"], name="last"),
    ]
    x = helper.make_tensor_value_info("x", FLOAT, [2, 2])
    graph = Graph(helper.make_model(helper.make_graph(nodes, "g", [x], [], [w])))
    assert stages_of(graph, {1: 0, 2: 1}) == (1, 0, 1)


def test_faults_are_collected():
    with pytest.raises(AnnotationError, match="annotations do not fit") as caught:
        stages_of(Graph(mlp()), {0: 1, 1: 0, 2: -1})
    assert "node 'bias0', tensor 'h0': it is made in stage 1 and read in stage 0" in str(
        caught.value
    )
    assert "node 'relu0': its stage is -1; count from 0" in str(caught.value)
