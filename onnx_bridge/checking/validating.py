"""`validate`: all checks of a model's annotations, without running it."""

from __future__ import annotations

import os
import warnings

import onnx

from ..errors import AnnotationError, AnnotationWarning
from ..reading.graph import Graph
from ..reading.opening import load
from .findings import Finding, by_severity
from .semantics import Check
from .structure import model_findings, node_findings, operator_findings

Location = tuple[str | None, str | None, str | None]  # configuration, node, tensor


def validate(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes, config: str | None = None
) -> list[Finding]:
    """Check the annotations of a model.

    Args:
        model: the model, or what `load` takes.
        config: name of the configuration to check; by default every one.

    Returns:
        What was found, errors first: errors of structure; where specs of one node do not go
        together, by the rules of proposal 0007 ("formalism") and by ours for operators that it
        does not mention ("extension"); and what has to move between devices. Empty if there is
        nothing to say.

    Raises:
        ModelError: it cannot be read at all.
        AnnotationError: there is no configuration of that name.

    Example:
        >>> from onnx import helper
        >>> node = helper.make_node("Relu", ["x"], ["y"], name="relu")
        >>> entry = node.device_configurations.add(configuration_id="tp")
        >>> spec = entry.sharding_spec.add(tensor_name="x", device=[0, 1])
        >>> spec.sharded_dim.add(axis=2).simple_sharding.add(num_shards=2).num_shards
        2
        >>> x = helper.make_tensor_value_info("x", 1, [4, 8])
        >>> graph = helper.make_graph([node], "g", [x], [])
        >>> model = helper.make_model(graph, ir_version=11)
        >>> model.configuration.add(name="tp", num_devices=2).num_devices
        2
        >>> for finding in validate(model):
        ...     print(finding)
        error   structure.axis-range: node 'relu', tensor 'x', axis 2: the tensor has axes -2 to 1

    Source: docs/IR.md of onnx, and its proposals 0006 and 0007.
    """
    graph, wrong, findings = _structure(model)
    proto = graph.model
    names = list(dict.fromkeys(configuration.name for configuration in proto.configuration))
    if config is not None and config not in names:
        listed = ", ".join(map(repr, names)) or "none"
        raise AnnotationError(f"the model has no configuration {config!r}; it has {listed}")
    for configuration in proto.configuration:
        if configuration.num_devices < 1 or config not in (None, configuration.name):
            continue
        broken = {(node, tensor) for of, node, tensor in wrong if of == configuration.name}
        findings += Check(graph, configuration.name, configuration.num_devices, broken).run()
    if config is not None:
        findings = [finding for finding in findings if finding.configuration in (None, config)]
    return by_severity(findings)


def checked(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
) -> tuple[Graph, set[Location]]:
    """Read a model, and find the specs that cannot be followed."""
    graph, wrong, _ = _structure(model)
    return graph, wrong


def _structure(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
) -> tuple[Graph, set[Location], list[Finding]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnnotationWarning)  # they are among the findings
        proto = load(model)
    graph = Graph(proto)
    findings = [*model_findings(proto), *node_findings(proto, graph)]
    findings += operator_findings(proto, graph)
    wrong: set[Location] = {
        (finding.configuration, finding.node, finding.tensor)
        for finding in findings
        if finding.severity == "error" and finding.tensor
    }
    return graph, wrong, findings
