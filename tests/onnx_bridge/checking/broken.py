"""Twenty-three ways to break an annotated model that ONNX's own checker accepts, and more.

Each function takes the sound model of `sound()` and breaks one thing; with it is the name of the
rule that has to find it.
"""

from collections.abc import Callable

import onnx
from onnx import helper

Break = Callable[[onnx.ModelProto], object]


def sound() -> onnx.ModelProto:
    """`y = x @ w`, w of (8, 16) split by columns over two devices."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
    entry = node.device_configurations.add(configuration_id="tp", pipeline_stage=0)
    split(entry.sharding_spec.add(tensor_name="w", device=[0, 1]), 1, 2)
    split(entry.sharding_spec.add(tensor_name="y", device=[0, 1]), 1, 2)
    graph = helper.make_graph(
        [node], "g", [value("x", [4, 8]), value("w", [8, 16])], [value("y", [4, 16])]
    )
    opset = helper.make_opsetid("", 18)
    model = helper.make_model(graph, ir_version=11, opset_imports=[opset])
    model.configuration.add(name="tp", num_devices=2)
    return model


def value(name: str, shape: list) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def split(spec: onnx.ShardingSpecProto, axis: int, shards: int) -> None:
    spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=shards)


def group(spec: onnx.ShardingSpecProto, key: int, devices: list[int]) -> None:
    spec.index_to_device_group_map.add(key=key, value=devices)


def entry(model: onnx.ModelProto) -> onnx.NodeDeviceConfigurationProto:
    return model.graph.node[0].device_configurations[0]


def w(model: onnx.ModelProto) -> onnx.ShardingSpecProto:
    return entry(model).sharding_spec[0]


def shards(model: onnx.ModelProto) -> onnx.SimpleShardedDimProto:
    return w(model).sharded_dim[0].simple_sharding[0]


def put(message, **fields) -> None:
    """Set scalar fields of a message, and elements of its lists by `field_0`."""
    for name, value in fields.items():
        name, at, index = name.rpartition("_") if name[-1].isdigit() else (name, "", "")
        if at:
            getattr(message, name)[int(index)] = value
        else:
            setattr(message, name, value)


def split_first_axis(model: onnx.ModelProto) -> None:
    """The contraction in two, of which `x` says that it is not split on both devices."""
    w(model).sharded_dim[0].axis = 0
    entry(model).sharding_spec.add(tensor_name="x", device=[0, 1])


def axis_twice(model: onnx.ModelProto) -> None:
    w(model).sharded_dim[0].axis = 1
    split(w(model), -1, 1)


def one_key_of_two_groups(model: onnx.ModelProto) -> None:
    w(model).device[:] = [-1]
    del w(model).sharded_dim[:]
    group(w(model), -1, [0])
    group(w(model), -1, [1])


def grouped(model: onnx.ModelProto, devices: list[int], members: list[int], count: int) -> None:
    model.configuration[0].num_devices = count
    w(model).device[:] = devices
    group(w(model), -1, members)


def in_three(model: onnx.ModelProto) -> None:
    model.configuration[0].num_devices = 3
    w(model).device[:] = [0, 1, 2]
    shards(model).num_shards = 3


def fused_axis_with_gaps(model: onnx.ModelProto) -> None:
    del w(model).sharded_dim[0].simple_sharding[:]
    for count in (1, 2):  # 16 columns are 4 x 4, and the inner factor is split
        w(model).sharded_dim[0].simple_sharding.add(dim_value=4, num_shards=count)


def no_devices(model: onnx.ModelProto) -> None:
    del w(model).device[:]
    shards(model).num_shards = 4


def wrong_symbol(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "n"
    shards(model).dim_param = "m"


def foreign(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.example"
    model.opset_import.add(domain="com.example", version=1)


BROKEN: list[tuple[str, Break]] = [
    ("structure.configuration-unknown", lambda m: put(entry(m), configuration_id="pp")),
    ("structure.configuration-id", lambda m: entry(m).ClearField("configuration_id")),
    ("structure.configuration-name", lambda m: m.configuration[0].ClearField("name")),
    ("structure.num-devices", lambda m: m.configuration[0].ClearField("num_devices")),
    ("structure.configuration-twice", lambda m: m.configuration.add(name="tp", num_devices=2)),
    ("structure.device-names", lambda m: m.configuration[0].device.extend("abc")),
    ("structure.entry-twice",
     lambda m: m.graph.node[0].device_configurations.add(configuration_id="tp")),
    ("structure.stage-negative", lambda m: put(entry(m), pipeline_stage=-5)),
    ("structure.tensor-unknown", lambda m: put(w(m), tensor_name="b")),
    ("structure.tensor-name", lambda m: w(m).ClearField("tensor_name")),
    ("structure.tensor-twice", lambda m: entry(m).sharding_spec.add().CopyFrom(w(m))),
    ("structure.axis-range", lambda m: put(w(m).sharded_dim[0], axis=7)),
    ("structure.axis-twice", axis_twice),
    ("structure.axis-missing", lambda m: w(m).sharded_dim[0].ClearField("axis")),
    ("structure.shards-positive", lambda m: put(shards(m), num_shards=0)),
    ("structure.shards-missing", lambda m: shards(m).ClearField("num_shards")),
    ("structure.shards-devices", lambda m: put(shards(m), num_shards=4)),
    ("structure.device-unknown", lambda m: put(w(m), device_1=99)),
    ("structure.group-missing", lambda m: put(w(m), device_0=-7)),
    ("structure.dim-value", lambda m: put(shards(m), dim_value=10)),
    ("formalism.shards", split_first_axis),
    ("structure.ir-version", lambda m: put(m, ir_version=10)),
    ("structure.ir-version", lambda m: put(m, ir_version=3)),
]  # fmt: skip
MORE: list[tuple[str, Break]] = [
    ("structure.sharding-missing",
     lambda m: w(m).sharded_dim[0].ClearField("simple_sharding")),
    ("structure.shards-positive", lambda m: put(shards(m), num_shards=-2)),
    ("structure.num-devices", lambda m: put(m.configuration[0], num_devices=0)),
    ("structure.device-twice", lambda m: put(w(m), device_1=0)),
    ("structure.group-twice", one_key_of_two_groups),
    ("structure.group-empty", lambda m: grouped(m, [-1, 1], [], 2)),
    ("structure.group-sizes", lambda m: grouped(m, [-1, 2], [0, 1], 3)),
    ("structure.uneven", in_three),
    ("structure.fused", fused_axis_with_gaps),
    ("structure.shards-devices", no_devices),
    ("structure.devices-implied", lambda m: w(m).ClearField("device")),
    ("structure.axis-order", lambda m: split(w(m), 0, 1)),
    ("structure.configuration-unused", lambda m: m.configuration.add(name="new", num_devices=2)),
    ("structure.nothing", lambda m: m.graph.node[0].ClearField("device_configurations")),
    ("structure.dim-param", wrong_symbol),
    ("structure.operator-unknown", lambda m: put(m.graph.node[0], op_type="MatMulTwice")),
    ("structure.operator-foreign", foreign),
]  # fmt: skip


def broken(rule: str) -> Break:
    """The first way to break a rule."""
    return next(change for name, change in [*BROKEN, *MORE] if name == rule)
