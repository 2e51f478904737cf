"""Small annotated ONNX models that the fuzzer of files starts from."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

EXTERNAL = "weights.bin"


def seeds() -> list[onnx.ModelProto]:
    """The models: a product, stages, a weight in another file, branches and functions, movement."""
    return [_product(), _stages(), _external(), _branches(), _movement()]


def _value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    size = 4
    for one in shape:
        size *= one
    return TensorProto(name=name, data_type=1, dims=shape, raw_data=bytes(size))


def _annotate(node: onnx.NodeProto, stage: int, **specs: tuple[list[int], int, int]) -> None:
    """Give a node a spec of (devices, axis, shards) per tensor; the first device -1 is a group."""
    entry = node.device_configurations.add(configuration_id="tp", pipeline_stage=stage)
    for name, (devices, axis, shards) in specs.items():
        spec = entry.sharding_spec.add(tensor_name=name, device=devices)
        if devices[0] == -1:
            spec.index_to_device_group_map.add(key=-1, value=[0, 1])
        if shards > 1:
            one = spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=shards)
            one.dim_value = 8


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: list[onnx.TensorProto],
    devices: int = 2,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    model = helper.make_model(graph, ir_version=11, opset_imports=opsets)
    names = [f"cpu:{number}" for number in range(devices)]
    model.configuration.add(name="tp", num_devices=devices, device=names)
    return model


def _product() -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
    _annotate(node, 0, w=([0, 1], 1, 2), x=([-1], 0, 1))
    return _model([node], [_value("x", "n", 8)], [_value("y", "n", 8)], [_weight("w", 8, 8)])


def _stages() -> onnx.ModelProto:
    up = helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="up", transB=1)
    down = helper.make_node("MatMul", ["h", "v"], ["y"], name="down")
    _annotate(up, 0, w=([0, 1], 0, 2), b=([0, 1], 0, 2))
    _annotate(down, 1, v=([2, 3], 0, 2))
    weights = [_weight("w", 8, 8), _weight("b", 8), _weight("v", 8, 8)]
    return _model([up, down], [_value("x", 4, 8)], [_value("y", 4, 8)], weights, 4)


def _external() -> onnx.ModelProto:
    model = _product()
    (w,) = model.graph.initializer
    w.ClearField("raw_data")
    w.data_location = TensorProto.EXTERNAL
    for key, said in (("location", EXTERNAL), ("offset", "0"), ("length", "256")):
        w.external_data.add(key=key, value=said)
    return model


def _branches() -> onnx.ModelProto:
    call = helper.make_node("Twice", ["x"], ["t"], domain="mine", name="call")
    branch = helper.make_graph([call], "branch", [], [_value("t", 4, 8)])
    choose = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch, name="if")
    relu = helper.make_node("Relu", ["y"], ["z"], name="relu")
    _annotate(relu, 0, y=([0, 1], 1, 2))
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    inputs = [_value("x", 4, 8), condition]
    model = _model([choose, relu], inputs, [_value("z", 4, 8)], [])
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    opsets = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, opsets))
    return model


def _movement() -> onnx.ModelProto:
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [4, 2, 4])
    order = helper.make_tensor("order", TensorProto.INT64, [1], [1])
    reshape = helper.make_node("Reshape", ["x", "shape"], ["r"], name="reshape")
    turn = helper.make_node("Transpose", ["r"], ["t"], name="turn", perm=[1, 0, 2])
    total = helper.make_node("ReduceSum", ["t", "order"], ["s"], name="total", keepdims=0)
    fill = helper.make_node("ConstantOfShape", ["order"], ["f"], name="fill")
    join = helper.make_node("Concat", ["s", "s"], ["y"], name="join", axis=0)
    _annotate(reshape, 0, x=([0, 1], 1, 2))
    nodes = [reshape, turn, total, fill, join]
    return _model(nodes, [_value("x", 4, 8)], [_value("y", 4, 4)], [shape, order])
