"""Annotated models as planning takes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from onnx import helper

from isoshard import P, Plan
from isoshard.onnx_bridge.errors import ModelError
from isoshard.planner.machine.topologies import topology
from isoshard.planner.traced.of_step import traced_step

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))


def mlp(batch="batch"):
    up = helper.make_tensor("up", 1, [8, 16], np.ones(128, np.float32))
    down = helper.make_tensor("down", 1, [16, 8], np.ones(128, np.float32))
    x = helper.make_tensor_value_info("x", 1, [batch, 8])
    y = helper.make_tensor_value_info("y", 1, [batch, 8])
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="act"),
        helper.make_node("MatMul", ["r", "down"], ["y"], name="second"),
    ]
    graph = helper.make_graph(nodes, "mlp", [x], [y], [up, down])
    return helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])


PLAN = Plan({"up": (None, "model"), "down": ("model", None)})
X = jax.ShapeDtypeStruct((4, 8), np.float32)


def test_a_plan_annotates_the_model():
    found = traced_step(mlp(), (X,), {}, MESH, PLAN)
    assert found.framework == "onnx"
    assert found.name == "mlp"
    layouts = {one.name: (one.role, one.sharding.spec) for one in found.inputs}
    assert layouts == {
        "up": ("parameter", P(None, "model")),
        "down": ("parameter", P("model")),
        "x": ("input", P()),
    }


def test_inputs_whose_shapes_the_file_says_need_not_be_given():
    found = traced_step(mlp(4), (), {}, MESH, PLAN)
    assert [one.shape for one in found.inputs if one.role == "input"] == [(4, 8)]


def test_an_input_that_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="x: axis 1 has size 9, not 8"):
        traced_step(mlp(), (jax.ShapeDtypeStruct((4, 9), np.float32),), {}, MESH, PLAN)
