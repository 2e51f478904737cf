"""Configurations and node annotations, as the file has them."""

import onnx
import pytest

from isoshard.onnx_bridge import AnnotationError
from isoshard.onnx_bridge.reading.annotations import choose, configurations, node_annotations
from tests.onnx_bridge.models import mlp


def with_configurations(*names, devices=2):
    model = mlp()
    for name in names:
        model.configuration.add(name=name, num_devices=devices)
    return model


def test_several_need_a_name():
    model = with_configurations("tp", "dp")
    assert choose(model, "dp").name == "dp"
    with pytest.raises(AnnotationError, match="configurations 'tp', 'dp'; say which"):
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
