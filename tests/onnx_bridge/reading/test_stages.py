"""Stages: those that are not named follow; values never run backwards."""

import pytest
from onnx import helper

from isoshard.onnx_bridge import AnnotationError, Graph
from isoshard.onnx_bridge.reading.stages import stages_of
from tests.onnx_bridge.models import FLOAT, mlp


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
