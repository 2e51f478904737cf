"""What a configuration makes of every node: the formalism's constraints and its inference.

A tensor lies as the node's own spec says; without one as it left the node that made it; an input of
the model or a weight without one is whole. A value that enters a later stage keeps its blocks, on
that stage's devices. Where an operator has no rule nothing is inferred, and no fault is reported
for what depends on it.

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
        broken: (node, tensor) of specs that have a structural fault; they are not followed.
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
            devices = [one.devices for one in specs.values()]
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
        """What nodes say, where it can be followed."""
        found: dict[int, dict[str, Placement]] = {}
        for node in self.graph.nodes:
            for entry in node.proto.device_configurations:
                if entry.configuration_id != self.config:
                    continue
                for spec in entry.sharding_spec:
                    name, shape = spec.tensor_name, self.graph.shape(spec.tensor_name)
                    if (node.name, name) in broken or shape is None:
                        continue
                    place = Placement.read(spec, len(shape), self.num_devices)
                    found.setdefault(node.index, {}).setdefault(name, self._pool.keep(place))
        return found

    def devices_of(self, stage: int) -> frozenset[int]:
        """The devices that a stage's specs name; every one if they name none."""
        return self._on_stage.get(stage) or frozenset(range(self.num_devices))

    def _stages(self) -> tuple[int, ...]:
        said = {}
        for node in self.graph.nodes:
            for entry in node.proto.device_configurations:
                if entry.configuration_id == self.config and entry.HasField("pipeline_stage"):
                    said.setdefault(node.index, max(0, entry.pipeline_stage))
        try:
            return stages_of(self.graph, said)
        except AnnotationError as error:
            self._say("structure.stage-order", error.reason, error.node, error.tensor)
            return (0,) * len(self.graph.nodes)

    def _node(self, node: Node, specs: Mapping[str, Placement]) -> None:
        places, unknown = self._inputs(node, specs)
        whole = not unknown and not any(places)
        factors = self._factors(node, matters=bool(specs) or any(places))
        natural: list[Placement | None] = [None] * len(node.outputs)
        follows = False
        if factors is not None:
            said = {number for number, name in enumerate(node.inputs) if name in specs}
            outcome = agree(factors, places, said)
            # What counts as whole may in truth be laid out: nothing is known of it.
            faults = [one for one in outcome.faults if one[1] not in unknown]
            for fault in faults:
                self._fault(node, factors, fault)
            self._traffic(node, factors, outcome)
            broken = any(rule != "unsharded-input" for rule, *_ in faults)
            follows, natural = not unknown and not broken, outcome.results
        for name, result in zip(node.outputs, natural, strict=True):
            declared = specs.get(name)
            if declared is not None and follows and result not in (None, declared):
                message = f"computed as {result}; delivered as {declared}"
                self._say("traffic.reshard", message, node.name, name)
            if not name:
                continue
            if declared is not None:
                self.results[name] = declared
            elif not (follows or whole):
                self.results[name] = None
            elif result is not None:
                self.results[name] = self._pool.keep(result)

    def _inputs(
        self, node: Node, specs: Mapping[str, Placement]
    ) -> tuple[list[Placement | None], set[int]]:
        """The layout of each input, None for whole ones, and those of which nothing is known."""
        places: list[Placement | None] = []
        unknown = set()
        for number, name in enumerate(node.inputs):
            made = self._arriving(node, name)
            if name in self.results and made is None and name not in specs:
                unknown.add(number)
            place = specs.get(name, made)
            places.append(place)
            if place is not None and name in specs:
                before = made or self._first.get(name)
                if before is not None and before != place:
                    self._say(
                        "traffic.reshard", f"it is {before}; read as {place}", node.name, name
                    )
                if name not in self.results:
                    self._first.setdefault(name, place)
        return places, unknown

    def _arriving(self, node: Node, name: str) -> Placement | None:
        """How a value comes from the node that made it, on the devices of this node's stage."""
        place = self.results.get(name)
        maker = self.graph.producer(name)
        if place is None or maker is None:
            return None
        here = self.stages[node.index]
        if self.stages[maker.index] == here or here not in self._on_stage:
            return place
        return place.moved(self._on_stage[here])

    def _factors(self, node: Node, matters: bool) -> Factors | None:
        rule = rule_of(node.op_type, node.domain)
        if rule is None:
            if matters:
                message = f"there is no rule for {node.op_type}, so its specs are not compared"
                self._say("traffic.no-rule", message, node.name)
            return None
        site = Site(self.graph, node)
        try:
            factors = rule(site)
            _check_ranks(factors, site)
        except Unfit as error:
            kind = "traffic.no-shape" if isinstance(error, NoShape) else "traffic.no-rule"
            if matters:
                self._say(kind, f"{node.op_type} is not checked: {error}", node.name)
            return None
        return factors

    def _fault(
        self, node: Node, factors: Factors, fault: tuple[str, int | None, int | None, str]
    ) -> None:
        rule, number, axis, message = fault
        tensor = None if number is None else node.inputs[number]
        self._say(f"{factors.basis}.{rule}", f"{node.op_type}: {message}", node.name, tensor, axis)

    def _traffic(self, node: Node, factors: Factors, outcome: Outcome) -> None:
        for number, axis in outcome.gathered:
            message = f"{node.op_type} needs it whole along this axis: it is gathered"
            self._say("traffic.reshard", message, node.name, node.inputs[number], axis)
        if outcome.combined:
            parts = " and ".join(f"{count}" for count in outcome.combined.values())
            message = f"{node.op_type} combines {parts} partial results across devices"
            self._say("traffic.collective", message, node.name)

    def _say(
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
    for axes, shapes, what in sides:
        if len(axes) != len(shapes):
            raise Unfit(f"it has {len(shapes)} {what}s")
        for number, (one, shape) in enumerate(zip(axes, shapes, strict=True)):
            if one is not None and shape is not None and len(one) != len(shape):
                raise Unfit(f"its {what} {number} has rank {len(shape)}")
