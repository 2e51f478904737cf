"""What each device holds: the same bytes as the layout on real devices has."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from onnx import helper, numpy_helper

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import ModelError, annotate, layout
from isoshard.onnx_bridge.checking.holdings import holdings
from isoshard.onnx_bridge.checking.placement import Placement, Pool
from isoshard.onnx_bridge.reading.layout_table import bytes_on_device
from tests.onnx_bridge.checking.broken import broken, sound, value


def mlp():
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in {"up": (8, 16), "bias": (16,), "down": (16, 8)}.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "up", "bias"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["r"], name="act"),
        helper.make_node("MatMul", ["r", "down"], ["y"], name="down"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", ["n", 8])], [value("y", ["n", 8])], weights)
    return helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])


SPECS = {"x": P("data"), "up": P(None, "model"), "bias": P("model"), "down": P("model")}


def test_the_bytes_are_those_of_the_layout():
    model = annotate(mlp(), make_mesh((2, 4), ("data", "model")), SPECS)
    found = layout(model)
    (stage,) = holdings(model)
    held = {one.name: one for one in stage.tensors}
    for name in ("up", "bias", "down"):
        size = bytes_on_device(found, name, found.parameters[name][0])
        assert [held[name].on(device) for device in range(8)] == [size] * 8
    assert stage.total(0, "parameter") == ((8 * 4 + 4 + 4 * 8) * 4, True)
    assert [one.kind for one in stage.tensors] == ["parameter"] * 3 + ["input"] + ["value"] * 3


def test_symbols_need_a_number():
    model = annotate(mlp(), make_mesh((2, 4), ("data", "model")), SPECS)
    (unknown,), (known,) = holdings(model), holdings(model, sizes={"n": 6})
    assert unknown.total(0, "input") == (0, False)
    assert known.total(0, "input") == (3 * 8 * 4, True)
    assert known.total(0, "value") == ((3 * 4 + 3 * 4 + 3 * 8) * 4, True)  # h and r are split by 8


def test_stages_have_devices_of_their_own():
    specs = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
    stages = {"up": 0, "act": 0, "down": 1}
    first, second = holdings(annotate(mlp(), make_mesh((4,), ("model",)), specs, stages=stages))
    assert (first.devices, second.devices) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.operators == ("Gemm", "Relu")
    assert first.total(0, "parameter") == ((8 * 4 + 4) * 4, True)
    assert second.total(0, "parameter") == (0, True)
    assert second.total(4, "parameter") == (4 * 8 * 4, True)


def test_a_spec_that_cannot_be_followed_is_left_out():
    model = sound()
    broken("structure.device-unknown")(model)
    (stage,) = holdings(model)
    assert {one.name: one.annotated for one in stage.tensors} == {"x": False, "w": False, "y": True}


def test_layouts_without_end_are_refused():
    pool = Pool(most=10)
    first = pool.keep(Placement.unsplit(1, range(6)))
    assert pool.keep(Placement.unsplit(1, range(6))) is first
    with pytest.raises(ModelError, match="too many layouts over too many devices"):
        pool.keep(Placement.unsplit(2, range(6)))
