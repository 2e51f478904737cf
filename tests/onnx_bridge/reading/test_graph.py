"""The graph: names, values, attributes, shapes, and graphs that are none."""

import numpy as np
import pytest
from onnx import helper

from isoshard.onnx_bridge import Graph, ModelError
from tests.onnx_bridge.models import FLOAT, mlp


def model_of(nodes, outputs=(), initializers=(), inputs=("x",)):
    given = [helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in inputs]
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, made, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx", 18)])


def test_who_makes_and_who_reads():
    graph = Graph(mlp())
    assert (graph.inputs, graph.outputs) == (("x",), ("y1",))
    assert graph.producer("y0").name == "relu0"
    assert graph.producer("x") is graph.producer("w0") is None
    assert [node.name for node in graph.consumers("y0")] == ["up1"]
    assert graph.consumers("y1") == ()
    assert list(graph.initializers) == ["w0", "b0", "w1", "b1"]
    assert graph.values[:3] == ("x", "w0", "b0")


def test_attributes_are_python_values():
    tensor = helper.make_tensor("t", FLOAT, [1], [2.0])
    node = helper.make_node(
        "Some", ["x"], ["y"], "n", domain="ai.onnx", i=3, f=0.5, s="text", many=[1, 2],
        words=["a", "b"], t=tensor,
    )  # fmt: skip
    node.attribute.extend([helper.make_attribute("tensors", [tensor, tensor])])
    (found,) = Graph(model_of([node])).nodes
    assert found.domain == ""
    assert found.attributes["i"] == 3 and found.attributes["f"] == 0.5
    assert found.attributes["s"] == "text" and found.attributes["words"] == ["a", "b"]
    assert found.attributes["many"] == [1, 2]
    assert found.attributes["t"] == tensor and found.attributes["tensors"] == [tensor, tensor]


def test_shapes_are_read_or_inferred():
    graph = Graph(mlp(batch="n"))
    assert graph.shape("w0") == (8, 8) and graph.dtype("w0") == np.float32
    assert graph.shape("h1") == ("n", 8) and graph.dtype("y1") == np.float32
    assert graph.shape("nobody") is None and graph.dtype("nobody") is None


def test_an_initializer_that_is_an_input_too():
    """As files before IR version 4 have them."""
    w = helper.make_tensor("w", FLOAT, [2, 3], [0.0] * 6)
    graph = Graph(model_of([helper.make_node("Add", ["x", "w"], ["y"])], ["y"], [w], ("x", "w")))
    assert graph.inputs == ("x",)
    assert graph.shape("y") == (2, 3)


def test_what_a_graph_inside_a_node_reads_counts_as_read():
    inner = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["c"])],
        "then",
        [],
        [helper.make_tensor_value_info("c", FLOAT, None)],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("If", ["x"], ["y"], "if", then_branch=inner, else_branch=inner),
    ]
    graph = Graph(model_of(nodes))
    assert graph.nodes[1].captured == ("a",)
    assert [node.name for node in graph.consumers("a")] == ["if"]


@pytest.mark.parametrize(("nodes", "outputs", "match"), [
    ([("Relu", "y", "x2"), ("Relu", "x", "y")], [], "'Relu_0' reads 'y' before it is made"),
    ([("Relu", "z", "y")], [], "'Relu_0' reads 'z' and nothing makes it"),
    ([("Relu", "x", "y"), ("Abs", "x", "y")], [], "'Abs_1' makes 'y', which is there already"),
    ([("Relu", "x", "x")], [], "makes 'x', which is there already"),
    ([("Relu", "a", "b"), ("Relu", "b", "a")], [], "reads 'a' before it is made"),
    ([("Relu", "x", "y")], ["z"], "output 'z' is made by nothing"),
])  # fmt: skip
def test_graphs_that_cannot_run(nodes, outputs, match):
    made = [helper.make_node(op, [read], [out]) for op, read, out in nodes]
    with pytest.raises(ModelError, match=match):
        Graph(model_of(made, outputs))


def test_sparse_initializers_and_attributes_of_functions():
    model = model_of([helper.make_node("Relu", ["x"], ["y"], alpha=1.0)])
    model.graph.node[0].attribute[0].ref_attr_name = "outer"
    model.graph.sparse_initializer.add()
    with pytest.raises(ModelError, match=r"'alpha' of node 'Relu_0' is a function's.*sparse"):
        Graph(model)


def test_shapes_that_cannot_be_inferred():
    model = mlp()
    model.ClearField("opset_import")
    with pytest.raises(ModelError, match=r"shapes of graph 'mlp' cannot be inferred: .*opset"):
        Graph(model).shape("h0")
