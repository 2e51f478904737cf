"""Findings of a check, and the table of its rules.

>>> finding = Finding("structure.axis-range", "w has rank 2", node="up", tensor="w", axis=7)
>>> print(finding)
error   structure.axis-range: node 'up', tensor 'w', axis 7: w has rank 2

The first part of a rule's name tells where it comes from. `structure`: the format's own text.
`formalism`: ONNX proposal 0007. `extension`: ours, for operators that the proposal does not
mention; nobody else has to agree, so these are warnings. `traffic`: what moves between devices.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "info"]


class FindingRule(NamedTuple):
    """What a finding can be about.

    Attributes:
        severity: "error": the annotation says nothing that can be followed; "warning": some tool
            will not follow it, or it is not what was meant; "info": good to know.
        meaning: in a few words.
    """

    severity: Severity
    meaning: str


RULES: dict[str, FindingRule] = {
    "structure.nothing": FindingRule("info", "no node is annotated"),
    "structure.ir-version": FindingRule("error", "annotations before IR version 11"),
    "structure.configuration-name": FindingRule("error", "a configuration without a name"),
    "structure.configuration-twice": FindingRule("error", "two configurations of one name"),
    "structure.configuration-unused": FindingRule("warning", "no node is annotated for it"),
    "structure.num-devices": FindingRule("error", "a configuration without a number of devices"),
    "structure.device-names": FindingRule("error", "not one device name per device"),
    "structure.configuration-id": FindingRule("error", "a node's entry names no configuration"),
    "structure.configuration-unknown": FindingRule("error", "a configuration that is not there"),
    "structure.entry-twice": FindingRule("error", "two entries of a node for one configuration"),
    "structure.stage-negative": FindingRule("error", "a pipeline stage below 0"),
    "structure.stage-order": FindingRule("error", "a value goes back to an earlier stage"),
    "structure.tensor-name": FindingRule("error", "a spec names no tensor"),
    "structure.tensor-unknown": FindingRule("error", "the node has no such input or output"),
    "structure.tensor-twice": FindingRule("error", "two specs of a node for one tensor"),
    "structure.axis-missing": FindingRule("error", "a split axis without its number"),
    "structure.axis-range": FindingRule("error", "an axis that the tensor does not have"),
    "structure.axis-twice": FindingRule("error", "one axis split twice"),
    "structure.axis-order": FindingRule("info", "axes listed out of order: listed order counts"),
    "structure.sharding-missing": FindingRule("error", "a split axis without its sharding"),
    "structure.shards-missing": FindingRule("error", "a split without its number of shards"),
    "structure.shards-positive": FindingRule("error", "a number of shards below 1"),
    "structure.shards-devices": FindingRule("error", "not one device or group per shard"),
    "structure.devices-implied": FindingRule("info", "no devices named: all, in order"),
    "structure.device-unknown": FindingRule("error", "a device the configuration does not have"),
    "structure.device-twice": FindingRule("error", "a device with two shards"),
    "structure.group-missing": FindingRule("error", "a group that the map does not have"),
    "structure.group-twice": FindingRule("error", "a group that the map has twice"),
    "structure.group-empty": FindingRule("error", "a group of no devices"),
    "structure.group-sizes": FindingRule("warning", "groups of different size: no NamedSharding"),
    "structure.dim-value": FindingRule("error", "a size that is not the tensor's"),
    "structure.dim-param": FindingRule("warning", "a symbol that is not the tensor's"),
    "structure.uneven": FindingRule("warning", "shards of different size: not supported by JAX"),
    "structure.fused": FindingRule("warning", "a fused axis whose shards are not contiguous"),
    "structure.operator-unknown": FindingRule("error", "an operator that ONNX does not have"),
    "structure.operator-foreign": FindingRule("info", "an operator of another domain"),
    "formalism.broadcast": FindingRule("error", "an axis of size 1 that is broadcast is split"),
    "formalism.shards": FindingRule("error", "axes that go together are split differently"),
    "formalism.devices": FindingRule("error", "shards that go together share no device"),
    "formalism.unsharded-input": FindingRule("warning", "inputs without a spec count as unsharded"),
    "extension.broadcast": FindingRule("warning", "as formalism.broadcast, for other operators"),
    "extension.shards": FindingRule("warning", "as formalism.shards, for other operators"),
    "extension.devices": FindingRule("warning", "as formalism.devices, for other operators"),
    "extension.unsharded-input": FindingRule("warning", "as formalism.unsharded-input, for others"),
    "traffic.reshard": FindingRule("info", "a tensor is resharded"),
    "traffic.collective": FindingRule("info", "partial results are combined across devices"),
    "traffic.no-rule": FindingRule("info", "no rule for this operator: not checked"),
    "traffic.no-shape": FindingRule("info", "a rank is unknown: not checked"),
}
"""Every rule by name."""

_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        rule: its name in `RULES`.
        message: what was found, and what would be right.
        node: name of the node, if it is about one.
        tensor: name of the tensor.
        axis: of the tensor.
        configuration: name of the configuration it is about; None for the file.

    Example:
        >>> Finding("structure.uneven", "3 rows in 2 shards", tensor="w", axis=0).severity
        'warning'
    """

    rule: str
    message: str
    node: str | None = None
    tensor: str | None = None
    axis: int | None = None
    configuration: str | None = None

    @property
    def severity(self) -> Severity:
        """How bad it is: "error", "warning" or "info"."""
        return RULES[self.rule].severity

    def __str__(self) -> str:
        """One line."""
        location = [
            f"node {self.node!r}" if self.node is not None else "",
            f"tensor {self.tensor!r}" if self.tensor is not None else "",
            f"axis {self.axis}" if self.axis is not None else "",
        ]
        where = ", ".join(item for item in location if item)
        return f"{self.severity:<7} {self.rule}: {f'{where}: ' if where else ''}{self.message}"


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Errors first; otherwise in the order they were found, each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.severity])
