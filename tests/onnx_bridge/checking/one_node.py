"""Models of one node whose tensors are sharded by specs over a mesh."""

import dataclasses

import numpy as np
import onnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import helper, numpy_helper

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import Graph, to_sharding_spec, validate
from isoshard.onnx_bridge.checking.placement import Placement
from isoshard.onnx_bridge.checking.semantics import Check


@dataclasses.dataclass
class Tensor:
    """A tensor of the node: shape, layout if it has one, value if it is constant."""

    shape: tuple
    spec: P | None = None
    value: list | None = None


def t(*shape, spec=None):
    return Tensor(shape, spec)


def constant(*values):
    return Tensor((len(values),), None, list(values))


def mesh():
    return make_mesh((2, 2), ("x", "y"))


def proto(name, shape, spec):
    return to_sharding_spec(NamedSharding(mesh(), spec), name, shape)


def placed(shape, spec):
    """Where a spec puts a tensor."""
    return Placement.read(proto("", shape, spec), len(shape), 4)


def model(op, inputs, outputs, domain="", opset=20, **attributes):
    names = [f"in{number}" if one else "" for number, one in enumerate(inputs)]
    results = [f"out{number}" for number in range(len(outputs))]
    node = helper.make_node(op, names, results, name="node", domain=domain, **attributes)
    entry = node.device_configurations.add(configuration_id="tp")
    weights, values = [], []
    for name, one in zip([*names, *results], [*inputs, *outputs], strict=True):
        if one is None:
            continue
        if one.value is not None:
            weights.append(numpy_helper.from_array(np.array(one.value, np.int64), name))
        else:
            values.append(helper.make_tensor_value_info(name, 1, one.shape))
        if one.spec is not None:
            entry.sharding_spec.append(proto(name, one.shape, one.spec))
    count = len(outputs)
    graph = helper.make_graph([node], "g", values[:-count], values[-count:], weights)
    opsets = [helper.make_opsetid("", opset)]
    made = helper.make_model(graph, ir_version=11, opset_imports=opsets)
    made.configuration.add(name="tp", num_devices=4)
    return made


def rules(made: onnx.ModelProto):
    """The rules of everything that `validate` finds."""
    return [finding.rule for finding in validate(made)]


def inferred(made: onnx.ModelProto):
    """Where the outputs are, and the rules of what was found on the way."""
    check = Check(Graph(made), "tp", 4, set())
    found = check.run()
    values = [value.name for value in made.graph.output]
    return [check.results.get(name) for name in values], [finding.rule for finding in found]
