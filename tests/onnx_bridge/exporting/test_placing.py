"""What nodes say of their modules, and the rewriting of a fused transpose."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from isoshard.onnx_bridge import Graph, ModelError
from isoshard.onnx_bridge.annotating.weight_layouts import modules_around
from isoshard.onnx_bridge.exporting.finishing import simplify

SCOPES = "pkg.torch.onnx.name_scopes"


@pytest.mark.parametrize("text", ["[", "1", "f()", "((" * 500])
def test_metadata_that_is_no_list_of_names(text):
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    node.metadata_props.add(key=SCOPES, value=text)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    graph = Graph(helper.make_model(helper.make_graph([node], "g", [x], [])))
    with pytest.raises(ModelError, match=f"node 'relu': the metadata '{SCOPES}' is no list"):
        modules_around(graph.nodes[0])


def keys(perm, whole, extra=()):
    """A model that transposes keys of shape (4, 2, 16, 8) through a fused axis."""
    nodes = [
        helper.make_node("Reshape", ["keys", "fused"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=perm),
        helper.make_node("Reshape", ["b", "whole"], ["y"]),
        *extra,
    ]
    shapes = {"fused": [-1, 16, 8], "whole": whole}
    tensors = [numpy_helper.from_array(np.array(v), k) for k, v in shapes.items()]
    given = helper.make_tensor_value_info("keys", TensorProto.FLOAT, [4, 2, 16, 8])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, whole)
    return helper.make_model(helper.make_graph(nodes, "g", [given], [made], tensors))


def test_a_transpose_through_a_fused_axis_becomes_one():
    model = keys([0, 2, 1], [4, 2, 8, 16])
    simplify(model)
    (node,) = Graph(model).nodes
    assert (node.op_type, node.attributes["perm"]) == ("Transpose", [0, 1, 3, 2])
    assert not model.graph.initializer


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(keys([0, 2, 1], [2, 4, 8, 16]), id="other axes come out"),
        pytest.param(keys([0, 1, 2], [4, 2, 16, 8]), id="no transpose"),
        pytest.param(
            keys([0, 2, 1], [4, 2, 8, 16], [helper.make_node("Relu", ["b"], ["c"])]),
            id="another reads the fused value",
        ),
    ],
)
def test_what_is_not_quite_that_stays(model):
    before = model.SerializeToString()
    simplify(model)
    assert model.SerializeToString() == before
