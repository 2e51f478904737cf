"""What a configuration makes of every node: the formalism's constraints and its inference.

A tensor is sharded as the node's own spec says; without one as it left the node that made it; an
input of the model or a weight without one is not split. A value that enters a later stage keeps its
blocks, on that stage's devices. Where an operator has no rule nothing is inferred, and no error is
reported for what depends on it.

Source: ONNX proposal 0007.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..errors import AnnotationError
from ..reading.graph import Graph, Node
from ..reading.stages import stages_of
from .agreement import Outcome, agree
from .factors import Factors, NoShape, Site, Unfit
from .findings import Finding
from .operator_rules import rule_of
from .placement import Placement, Pool


class Check:
    """The check of one configuration of a model; `run` it once.

    Args:
        graph: the main graph.
        config: name of the configuration.
        num_devices: its devices.
        broken: (node, tensor) of specs that have a structural error; they are not followed.
    """

    def __init__(
        self,
        graph: Graph,
        config: str,
        num_devices: int,
        broken: Collection[tuple[str | None, str | None]],
    ) -> None:
        """Read the configuration's specs and stages."""
        self.graph, self.config, self.num_devices = graph, config, num_devices
        self.findings: list[Finding] = []
        self._pool = Pool()
        self.declared = self._read(broken)
        self.stages = self._stages()
        self._on_stage: dict[int, frozenset[int]] = {}
        for index, specs in self.declared.items():
            stage = self.stages[index]
            devices = [spec.devices for spec in specs.values()]
            self._on_stage[stage] = self._on_stage.get(stage, frozenset()).union(*devices)
        self.results: dict[str, Placement | None] = {}  # None: not known; not there: whole
        self._first: dict[str, Placement] = {}  # where a weight or input is read first

    def run(self) -> list[Finding]:
        """Check every node in order."""
        for node in self.graph.nodes:
            self._node(node, self.declared.get(node.index, {}))
        return self.findings

    def _read(
        self, broken: Collection[tuple[str | None, str | None]]
    ) -> dict[int, dict[str, Placement]]:
        """The specs of nodes, where they can be followed."""
        declared: dict[int, dict[str, Placement]] = {}
        for node in self.graph.nodes:
            for entry in node.proto.device_configurations:
                if entry.configuration_id != self.config:
                    continue
                for spec in entry.sharding_spec:
                    name, shape = spec.tensor_name, self.graph.shape(spec.tensor_name)
                    if (node.name, name) in broken or shape is None:
                        continue
                    placement = Placement.read(spec, len(shape), self.num_devices)
                    declared.setdefault(node.index, {}).setdefault(name, self._pool.keep(placement))
        return declared

    def devices_of(self, stage: int) -> frozenset[int]:
        """The devices that a stage's specs name; every one if they name none."""
        return self._on_stage.get(stage) or frozenset(range(self.num_devices))

    def _stages(self) -> tuple[int, ...]:
        annotated = {}
        for node in self.graph.nodes:
            for entry in node.proto.device_configurations:
                if entry.configuration_id == self.config and entry.HasField("pipeline_stage"):
                    annotated.setdefault(node.index, max(0, entry.pipeline_stage))
        try:
            return stages_of(self.graph, annotated)
        except AnnotationError as error:
            self._add("structure.stage-order", error.reason, error.node, error.tensor)
            return (0,) * len(self.graph.nodes)

    def _node(self, node: Node, specs: Mapping[str, Placement]) -> None:
        placements, unknown = self._inputs(node, specs)
        all_unsplit = not unknown and not any(placements)
        factors = self._factors(node, matters=bool(specs) or any(placements))
        natural: list[Placement | None] = [None] * len(node.outputs)
        follows = False
        if factors is not None:
            annotated = {index for index, name in enumerate(node.inputs) if name in specs}
            outcome = agree(factors, placements, annotated)
            # What counts as whole may in truth be sharded: nothing is known of it.
            errors = [error for error in outcome.errors if error[1] not in unknown]
            for error in errors:
                self._add_error(node, factors, error)
            self._traffic(node, factors, outcome)
            broken = any(rule != "unsharded-input" for rule, *_ in errors)
            follows, natural = not unknown and not broken, outcome.results
        for name, result in zip(node.outputs, natural, strict=True):
            declared = specs.get(name)
            if declared is not None and follows and result not in (None, declared):
                message = f"computed as {result}; delivered as {declared}"
                self._add("traffic.reshard", message, node.name, name)
            if not name:
                continue
            if declared is not None:
                self.results[name] = declared
            elif not (follows or all_unsplit):
                self.results[name] = None
            elif result is not None:
                self.results[name] = self._pool.keep(result)

    def _inputs(
        self, node: Node, specs: Mapping[str, Placement]
    ) -> tuple[list[Placement | None], set[int]]:
        """The sharding of each input, None for unsharded ones, and the inputs without one."""
        placements: list[Placement | None] = []
        unknown = set()
        for index, name in enumerate(node.inputs):
            arriving = self._arriving(node, name)
            if name in self.results and arriving is None and name not in specs:
                unknown.add(index)
            placement = specs.get(name, arriving)
            placements.append(placement)
            if placement is not None and name in specs:
                before = arriving or self._first.get(name)
                if before is not None and before != placement:
                    self._add(
                        "traffic.reshard", f"it is {before}; read as {placement}", node.name, name
                    )
                if name not in self.results:
                    self._first.setdefault(name, placement)
        return placements, unknown

    def _arriving(self, node: Node, name: str) -> Placement | None:
        """How a value comes from the node that made it, on the devices of this node's stage."""
        placement = self.results.get(name)
        maker = self.graph.producer(name)
        if placement is None or maker is None:
            return None
        stage = self.stages[node.index]
        if self.stages[maker.index] == stage or stage not in self._on_stage:
            return placement
        return placement.moved(self._on_stage[stage])

    def _factors(self, node: Node, matters: bool) -> Factors | None:
        rule = rule_of(node.op_type, node.domain)
        if rule is None:
            if matters:
                message = f"there is no rule for {node.op_type}, so its specs are not compared"
                self._add("traffic.no-rule", message, node.name)
            return None
        site = Site(self.graph, node)
        try:
            factors = rule(site)
            _check_ranks(factors, site)
        except Unfit as error:
            kind = "traffic.no-shape" if isinstance(error, NoShape) else "traffic.no-rule"
            if matters:
                self._add(kind, f"{node.op_type} is not checked: {error}", node.name)
            return None
        return factors

    def _add_error(
        self, node: Node, factors: Factors, error: tuple[str, int | None, int | None, str]
    ) -> None:
        rule, index, axis, message = error
        tensor = None if index is None else node.inputs[index]
        self._add(f"{factors.basis}.{rule}", f"{node.op_type}: {message}", node.name, tensor, axis)

    def _traffic(self, node: Node, factors: Factors, outcome: Outcome) -> None:
        for index, axis in outcome.gathered:
            message = f"{node.op_type} needs it unsplit along this axis: it is gathered"
            self._add("traffic.reshard", message, node.name, node.inputs[index], axis)
        if outcome.combined:
            counts_text = " and ".join(f"{count}" for count in outcome.combined.values())
            message = f"{node.op_type} combines {counts_text} partial results across devices"
            self._add("traffic.collective", message, node.name)

    def _add(
        self,
        rule: str,
        message: str,
        node: str | None = None,
        tensor: str | None = None,
        axis: int | None = None,
    ) -> None:
        self.findings.append(Finding(rule, message, node, tensor, axis, self.config))


def _check_ranks(factors: Factors, site: Site) -> None:
    """Raise if a rule's axes are not those of the tensors: the node is not as it should be."""
    sides = ((factors.inputs, site.inputs, "input"), (factors.outputs, site.outputs, "output"))
    for axes, shapes, role in sides:
        if len(axes) != len(shapes):
            raise Unfit(f"it has {len(shapes)} {role}s")
        for index, (axes_of, shape) in enumerate(zip(axes, shapes, strict=True)):
            if axes_of is not None and shape is not None and len(axes_of) != len(shape):
                raise Unfit(f"its {role} {index} has rank {len(shape)}")
