"""Checks that annotations are well formed: configurations, and nodes' entries for them.

ONNX's own checker looks at none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import onnx

from ..reading.graph import Graph
from ..reading.walking import bodies, describe_node, shown
from .findings import Finding
from .specs import Dims, spec_problems

FIRST_IR = 11  # the first version that has annotations

ShapeOf = Callable[[str], Dims | None]


def model_findings(model: onnx.ModelProto) -> Iterator[Finding]:
    """Look at the configurations of a model."""
    nodes = [node for body in bodies(model) for node in body.proto.node]
    used = {entry.configuration_id for node in nodes for entry in node.device_configurations}
    annotated = any(node.device_configurations for node in nodes)
    if (annotated or model.configuration) and model.ir_version < FIRST_IR:
        yield Finding(
            "structure.ir-version",
            f"IR version {model.ir_version} has no annotations: set ir_version to {FIRST_IR}",
        )
    if not annotated:
        yield Finding("structure.nothing", "no node is annotated")
    names = Counter(configuration.name for configuration in model.configuration)
    for configuration in model.configuration:
        yield from _configuration(configuration, used, names)


def _configuration(
    configuration: onnx.DeviceConfigurationProto, used: set[str], names: Counter[str]
) -> Iterator[Finding]:
    def finding(rule: str, message: str) -> Finding:
        return Finding(
            rule,
            f"configuration {shown(configuration.name)}: {message}",
            configuration=configuration.name,
        )

    if not configuration.name:
        message = "a configuration has no name, so no node can mean it"
        yield Finding("structure.configuration-name", message)
    elif names[configuration.name] > 1:
        yield finding(
            "structure.configuration-twice", f"there are {names[configuration.name]} of that name"
        )
    if not configuration.HasField("num_devices"):
        yield finding("structure.num-devices", "it does not say for how many devices: num_devices")
    elif configuration.num_devices < 1:
        yield finding("structure.num-devices", f"it is for {configuration.num_devices} devices")
    elif configuration.device and len(configuration.device) != configuration.num_devices:
        named = f"{len(configuration.device)} devices of {configuration.num_devices}"
        message = f"it names {named}: name all or none"
        yield finding("structure.device-names", message)
    if configuration.name and configuration.name not in used:
        yield finding("structure.configuration-unused", "no node is annotated for it")


def node_findings(model: onnx.ModelProto, graph: Graph) -> Iterator[Finding]:
    """Look at the annotations of every node, those in functions and inner graphs included."""
    devices = {
        configuration.name: configuration.num_devices for configuration in model.configuration
    }
    for body in bodies(model):
        main = body.proto is model.graph
        for index, node in enumerate(body.proto.node):
            name = graph.nodes[index].name if main else node.name or describe_node(node)
            shape_of: ShapeOf = graph.shape if main else _unknown
            yield from _node(node, name, devices, shape_of)


def _unknown(value: str) -> None:
    """Shapes of values outside the main graph are not looked for."""


def _node(
    node: onnx.NodeProto, name: str, devices: dict[str, int], shape_of: ShapeOf
) -> Iterator[Finding]:
    configurations = ", ".join(map(shown, devices)) or "none"
    entries = Counter(entry.configuration_id for entry in node.device_configurations)
    for config, count in entries.items():
        if not config:
            message = f"an annotation names no configuration; there is {configurations}"
            yield Finding("structure.configuration-id", message, name)
        elif config not in devices:
            message = f"it is annotated for {shown(config)}; the model has {configurations}"
            yield Finding("structure.configuration-unknown", message, name, configuration=config)
        if count > 1:
            message = f"it has {count} annotations for {shown(config)}: keep one"
            yield Finding("structure.entry-twice", message, name, configuration=config)
    for entry in node.device_configurations:
        if entry.pipeline_stage < 0:
            message = f"its stage is {entry.pipeline_stage}: count from 0"
            yield Finding(
                "structure.stage-negative", message, name, configuration=entry.configuration_id
            )
        yield from _specs(node, name, entry, devices, shape_of)


def _specs(
    node: onnx.NodeProto,
    name: str,
    entry: onnx.NodeDeviceConfigurationProto,
    devices: dict[str, int],
    shape_of: ShapeOf,
) -> Iterator[Finding]:
    names = [value for value in (*node.input, *node.output) if value]
    config = entry.configuration_id
    for tensor, count in Counter(spec.tensor_name for spec in entry.sharding_spec).items():
        have = ", ".join(map(shown, names))
        if not tensor:
            message = f"a spec does not say of which tensor; the node has {have}"
            yield Finding("structure.tensor-name", message, name, configuration=config)
        elif tensor not in names:
            message = f"the node neither reads nor makes it: it has {have}"
            yield Finding("structure.tensor-unknown", message, name, tensor, configuration=config)
        if tensor and count > 1:
            message = f"it has {count} specs: keep one"
            yield Finding("structure.tensor-twice", message, name, tensor, configuration=config)
    for spec in entry.sharding_spec:
        shape = shape_of(spec.tensor_name) if spec.tensor_name in names else None
        for problem in spec_problems(spec, shape, max(0, devices.get(config, 0))):
            yield Finding(
                problem.rule, problem.message, name, spec.tensor_name, problem.axis, config
            )


def operator_findings(model: onnx.ModelProto, graph: Graph) -> Iterator[Finding]:
    """Look for operators that nothing defines."""
    functions = {(configuration.domain, configuration.name) for configuration in model.functions}
    reported = set()
    for node in graph.nodes:
        key = (node.domain, node.op_type)
        if key in functions or key in reported or onnx.defs.has(node.op_type, node.domain):
            continue
        reported.add(key)
        if node.domain:
            message = f"nothing here knows {shown(node.op_type)} of {shown(node.domain)}"
            yield Finding("structure.operator-foreign", message, node.name)
        else:
            message = f"ONNX {onnx.__version__} has no operator {shown(node.op_type)}"
            yield Finding("structure.operator-unknown", message, node.name)
