"""Annotations that point at nothing, as tools leave them that rename or drop what they name.

>>> from onnx import helper
>>> node = helper.make_node("Relu", ["sub/x"], ["sub/y"], name="relu")
>>> entry = node.device_configurations.add(configuration_id="tp")
>>> spec = entry.sharding_spec.add(tensor_name="x")          # a prefix was added, but not here
>>> for one in dangling(helper.make_model(helper.make_graph([node], "g", [], []))):
...     print(one)
node 'relu' is annotated for configuration 'tp', which the model does not have: it has none
node 'relu' has a spec for 'x', which it neither reads nor makes: it has 'sub/x', 'sub/y'
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from .walking import bodies, describe_node, shown


def dangling(model: onnx.ModelProto) -> list[str]:
    """Find annotations that point at nothing."""
    config_names = [configuration.name for configuration in model.configuration]
    messages = list(_dangling(model, config_names))
    annotated = any(
        node.device_configurations for body in bodies(model) for node in body.proto.node
    )
    if config_names and not annotated:
        names = ", ".join(map(shown, config_names))
        messages.append(f"it describes configuration {names}, but no node is annotated for it")
    return messages


def _dangling(model: onnx.ModelProto, config_names: list[str]) -> Iterator[str]:
    listed = ", ".join(map(shown, config_names)) or "none"
    for body in bodies(model):
        for node in body.proto.node:
            names = [name for name in (*node.input, *node.output) if name]
            for entry in node.device_configurations:
                if entry.configuration_id not in config_names:
                    yield (
                        f"{describe_node(node)} is annotated for configuration "
                        f"{shown(entry.configuration_id)}, which the model does not have: "
                        f"it has {listed}"
                    )
                for spec in entry.sharding_spec:
                    if spec.tensor_name not in names:
                        yield (
                            f"{describe_node(node)} has a spec for {shown(spec.tensor_name)}, "
                            f"which it neither reads nor makes: it has "
                            f"{', '.join(map(shown, names))}"
                        )
