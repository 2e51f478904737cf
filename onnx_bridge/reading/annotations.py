"""The annotations of a model: its device configurations, and each node's entries for them.

>>> from onnx import helper
>>> node = helper.make_node("Relu", ["x"], ["y"], name="relu")
>>> said = node.device_configurations.add(configuration_id="tp", pipeline_stage=1)
>>> _ = said.sharding_spec.add(tensor_name="x", device=[0, 1])
>>> model = helper.make_model(helper.make_graph([node], "g", [], []))
>>> _ = model.configuration.add(name="tp", num_devices=2)
>>> choose(model)
Configuration(name='tp', num_devices=2, devices=())
>>> found = node_annotations(model, "tp")
>>> found[0].stage, list(found[0].specs)
(1, ['x'])

What points at nothing, or says two things of one tensor, is an error here: a reader would have to
guess. `isoshard.onnx_bridge.validate` lists such errors instead.

Source: onnx.proto and docs/IR.md of onnx, since IR version 11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx

from ..errors import AnnotationError, raise_annotations


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run a model on several devices.

    Attributes:
        name: by which nodes refer to it.
        num_devices: devices in all.
        devices: their names, information only; or ().
    """

    name: str
    num_devices: int
    devices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NodeAnnotation:
    """A node's entry for a configuration.

    Attributes:
        stage: the pipeline stage, or None if it says none.
        specs: by name of an input or output of the node.
    """

    stage: int | None
    specs: dict[str, onnx.ShardingSpecProto]


def configurations(model: onnx.ModelProto) -> dict[str, Configuration]:
    """Read the device configurations of a model."""
    by_name: dict[str, Configuration] = {}
    errors = []
    for proto in model.configuration:
        configuration = Configuration(proto.name, proto.num_devices, tuple(proto.device))
        if not configuration.name:
            errors.append(AnnotationError("a device configuration has no name; give it one"))
        elif configuration.name in by_name:
            errors.append(
                AnnotationError(f"configuration {configuration.name!r} is there twice; rename one")
            )
        if configuration.num_devices < 1:
            errors.append(
                AnnotationError(
                    f"configuration {configuration.name!r} has {configuration.num_devices} devices"
                )
            )
        if configuration.devices and len(configuration.devices) != configuration.num_devices:
            errors.append(
                AnnotationError(
                    f"configuration {configuration.name!r} has {configuration.num_devices} devices "
                    f"and names {len(configuration.devices)}; name all or none"
                )
            )
        by_name[configuration.name] = configuration
    raise_annotations(errors)
    return by_name


def choose(model: onnx.ModelProto, config: str | None = None) -> Configuration:
    """Find one configuration of a model.

    Example:
        >>> choose(onnx.ModelProto())
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.AnnotationError: the model has no device configuration, so it is not annotated; annotate it: iso.onnx.annotate(model, mesh, specs)
    """  # noqa: E501
    by_name = configurations(model)
    if not by_name:
        raise AnnotationError(
            "the model has no device configuration, so it is not annotated; annotate it: "
            "iso.onnx.annotate(model, mesh, specs)"
        )
    names = ", ".join(map(repr, by_name))
    if config is None and len(by_name) > 1:
        raise AnnotationError(f"the model has configurations {names}; choose one: config=..")
    if config is not None and config not in by_name:
        raise AnnotationError(f"the model has no configuration {config!r}; there is {names}")
    return next(iter(by_name.values())) if config is None else by_name[config]


def node_annotations(model: onnx.ModelProto, config: str) -> dict[int, NodeAnnotation]:
    """Read a configuration's entries of the nodes of the main graph.

    Raises:
        AnnotationError: a node has two annotations for it, or a spec names a tensor twice or one
            that the node neither reads nor makes; all errors in one message.
    """
    by_node = {}
    errors: list[AnnotationError] = []
    for index, node in enumerate(model.graph.node):
        entries = [e for e in node.device_configurations if e.configuration_id == config]
        name = node.name or f"{node.op_type}_{index}"
        if len(entries) > 1:
            reason = f"it has {len(entries)} annotations for {config!r}; keep one"
            errors.append(AnnotationError(reason, node=name))
        if entries:
            errors += _errors(entries[0], node, name)
            stage = entries[0].pipeline_stage if entries[0].HasField("pipeline_stage") else None
            specs = {spec.tensor_name: spec for spec in entries[0].sharding_spec}
            by_node[index] = NodeAnnotation(stage, specs)
    raise_annotations(errors)
    return by_node


def _errors(
    entry: onnx.NodeDeviceConfigurationProto, node: onnx.NodeProto, name: str
) -> Iterator[AnnotationError]:
    present = [value for value in (*node.input, *node.output) if value]
    visited: set[str] = set()
    for spec in entry.sharding_spec:
        tensor = spec.tensor_name
        if tensor not in present:
            yield AnnotationError(
                "the node neither reads nor makes it: a tool has renamed its values without its "
                f"annotations; it has {', '.join(map(repr, present))}",
                node=name,
                tensor=tensor,
            )
        elif tensor in visited:
            yield AnnotationError("the tensor has two specs; keep one", node=name, tensor=tensor)
        visited.add(tensor)
