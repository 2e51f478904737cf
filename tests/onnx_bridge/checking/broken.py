"""Twenty-three ways to break an annotated model that ONNX's own checker accepts, and more.

Each function takes the sound model of `sound()` and breaks one thing; `BROKEN` has the name of the
rule that has to find it.
"""

from collections.abc import Callable

import onnx
from onnx import helper

Break = Callable[[onnx.ModelProto], None]
BROKEN: dict[str, tuple[str, Break]] = {}
MORE: dict[str, tuple[str, Break]] = {}


def sound() -> onnx.ModelProto:
    """`y = x @ w`, w of (8, 16) split by columns over two devices."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
    entry = node.device_configurations.add(configuration_id="tp", pipeline_stage=0)
    split(entry.sharding_spec.add(tensor_name="w", device=[0, 1]), 1, 2)
    split(entry.sharding_spec.add(tensor_name="y", device=[0, 1]), 1, 2)
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", [4, 8]), value("w", [8, 16])],
        [value("y", [4, 16])],
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


def breaks(rule: str, table: dict[str, tuple[str, Break]] = BROKEN) -> Callable[[Break], Break]:
    def register(function: Break) -> Break:
        table[function.__name__] = (rule, function)
        return function

    return register


@breaks("structure.configuration-unknown")
def unknown_configuration_id(model):
    entry(model).configuration_id = "pp"


@breaks("structure.configuration-id")
def missing_configuration_id(model):
    entry(model).ClearField("configuration_id")


@breaks("structure.configuration-name")
def missing_configuration_name(model):
    model.configuration[0].ClearField("name")


@breaks("structure.num-devices")
def missing_num_devices(model):
    model.configuration[0].ClearField("num_devices")


@breaks("structure.configuration-twice")
def duplicate_configurations(model):
    model.configuration.add(name="tp", num_devices=2)


@breaks("structure.device-names")
def device_names_of_another_number(model):
    model.configuration[0].device.extend(["cpu:0", "cpu:1", "cpu:2"])


@breaks("structure.entry-twice")
def duplicate_node_entries(model):
    model.graph.node[0].device_configurations.add(configuration_id="tp")


@breaks("structure.stage-negative")
def stage_minus_five(model):
    entry(model).pipeline_stage = -5


@breaks("structure.tensor-unknown")
def tensor_not_on_the_node(model):
    w(model).tensor_name = "b"


@breaks("structure.tensor-name")
def missing_tensor_name(model):
    w(model).ClearField("tensor_name")


@breaks("structure.tensor-twice")
def duplicate_specs(model):
    entry(model).sharding_spec.add().CopyFrom(w(model))


@breaks("structure.axis-range")
def axis_seven_of_rank_two(model):
    w(model).sharded_dim[0].axis = 7


@breaks("structure.axis-twice")
def axis_twice(model):
    w(model).sharded_dim[0].axis = 1
    split(w(model), -1, 1)


@breaks("structure.axis-missing")
def missing_axis(model):
    w(model).sharded_dim[0].ClearField("axis")


@breaks("structure.shards-positive")
def num_shards_zero(model):
    shards(model).num_shards = 0


@breaks("structure.shards-missing")
def missing_num_shards(model):
    shards(model).ClearField("num_shards")


@breaks("structure.shards-devices")
def num_shards_not_the_number_of_devices(model):
    shards(model).num_shards = 4


@breaks("structure.device-unknown")
def device_99_of_2(model):
    w(model).device[1] = 99


@breaks("structure.group-missing")
def group_that_is_not_in_the_map(model):
    w(model).device[0] = -7


@breaks("structure.dim-value")
def wrong_dim_value(model):
    shards(model).dim_value = 10


@breaks("formalism.shards")
def contradictory_contraction(model):
    w(model).sharded_dim[0].axis = 0  # k in two, and x says it is whole on both
    entry(model).sharding_spec.add(tensor_name="x", device=[0, 1])


@breaks("structure.ir-version")
def ir_version_10(model):
    model.ir_version = 10


@breaks("structure.ir-version")
def ir_version_3(model):
    model.ir_version = 3


@breaks("structure.sharding-missing", MORE)
def no_simple_sharding(model):
    del w(model).sharded_dim[0].simple_sharding[:]


@breaks("structure.shards-positive", MORE)
def num_shards_negative(model):
    shards(model).num_shards = -2


@breaks("structure.num-devices", MORE)
def num_devices_zero(model):
    model.configuration[0].num_devices = 0


@breaks("structure.device-twice", MORE)
def device_twice(model):
    w(model).device[1] = 0


@breaks("structure.group-twice", MORE)
def group_key_twice(model):
    w(model).device[:] = [-1]
    del w(model).sharded_dim[:]
    group(w(model), -1, [0])
    group(w(model), -1, [1])


@breaks("structure.group-empty", MORE)
def empty_group(model):
    w(model).device[0] = -1
    group(w(model), -1, [])


@breaks("structure.group-sizes", MORE)
def groups_of_different_size(model):
    model.configuration[0].num_devices = 3
    w(model).device[:] = [-1, 2]
    group(w(model), -1, [0, 1])


@breaks("structure.uneven", MORE)
def uneven_shards(model):
    model.configuration[0].num_devices = 3
    w(model).device[:] = [0, 1, 2]
    shards(model).num_shards = 3


@breaks("structure.fused", MORE)
def fused_axis_with_gaps(model):
    del w(model).sharded_dim[0].simple_sharding[:]
    for count in (1, 2):  # 16 columns are 4 x 4, and the inner factor is split
        w(model).sharded_dim[0].simple_sharding.add(dim_value=4, num_shards=count)


@breaks("structure.shards-devices", MORE)
def no_devices(model):
    del w(model).device[:]
    shards(model).num_shards = 4


@breaks("structure.devices-implied", MORE)
def devices_left_out(model):
    del w(model).device[:]


@breaks("structure.axis-order", MORE)
def axes_out_of_order(model):
    split(w(model), 0, 1)


@breaks("structure.configuration-unused", MORE)
def configuration_that_no_node_means(model):
    model.configuration.add(name="other", num_devices=2)


@breaks("structure.nothing", MORE)
def annotations_dropped(model):
    del model.graph.node[0].device_configurations[:]


@breaks("structure.dim-param", MORE)
def wrong_symbol(model):
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "n"
    shards(model).dim_param = "m"


@breaks("structure.operator-unknown", MORE)
def operator_that_onnx_does_not_have(model):
    model.graph.node[0].op_type = "MatMulTwice"


@breaks("structure.operator-foreign", MORE)
def operator_of_another_domain(model):
    model.graph.node[0].domain = "com.example"
    model.opset_import.add(domain="com.example", version=1)
