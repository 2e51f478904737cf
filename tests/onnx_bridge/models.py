"""Small models and messages that the tests of the bridge share."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

FLOAT = onnx.TensorProto.FLOAT


def spec(text: str) -> onnx.ShardingSpecProto:
    """A ShardingSpecProto from protobuf's text format."""
    from google.protobuf import text_format

    return text_format.Parse(text, onnx.ShardingSpecProto())


def mlp(layers: int = 2, width: int = 8, batch: int | str = 16) -> onnx.ModelProto:
    """MatMul, Add, Relu, and again; weights `w0`, `b0`, .., nodes `up0`, `bias0`, `relu0`, .."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        for name, shape in ((f"w{layer}", (width, width)), (f"b{layer}", (width,))):
            array = rng.standard_normal(shape).astype(np.float32)
            weights.append(numpy_helper.from_array(array, name))
        for op, read, made, name in (
            ("MatMul", [value, f"w{layer}"], f"h{layer}", f"up{layer}"),
            ("Add", [f"h{layer}", f"b{layer}"], f"s{layer}", f"bias{layer}"),
            ("Relu", [f"s{layer}"], f"y{layer}", f"relu{layer}"),
        ):
            nodes.append(helper.make_node(op, read, [made], name=name))
        value = f"y{layer}"
    x = helper.make_tensor_value_info("x", FLOAT, [batch, width])
    y = helper.make_tensor_value_info(value, FLOAT, [batch, width])
    graph = helper.make_graph(nodes, "mlp", [x], [y], weights)
    opset = helper.make_opsetid("", 18)
    return helper.make_model(graph, ir_version=11, opset_imports=[opset])
