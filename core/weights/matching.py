"""Matching: which leaves each rule takes, what it makes of them, and everything that does not fit.

>>> from .ops import Kernel
>>> from .weight_rules import Rule
>>> matching = Matching([Rule("{path*}.weight", "{path*}.kernel", Kernel())], {"up.weight": (8, 4)})
>>> matching.groups[0].shapes, matching.errors
({'up.kernel': (4, 8)}, [])
>>> Matching([Rule("{path*}.weight", "{path*}.kernel", Kernel())], {"up.bias": (8,)}).errors
['up.bias (8,): no rule takes it']
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from isoshard.core.runtime.formatting import listed

from .ops import OpError, Shape, WaitingMemory
from .weight_rules import Rule

Names = tuple[tuple[str, ...], ...]  # for each layer (one, if nothing is stacked) for each pattern


@dataclasses.dataclass(frozen=True)
class RuleGroup:
    """A rule with the leaves that it takes together.

    Attributes:
        rule: the rule.
        sources: names, layer by layer.
        targets: names, layer by layer.
        inputs: the shapes of the sources of one layer.
    """

    rule: Rule
    sources: Names
    targets: Names
    inputs: tuple[Shape, ...]

    @functools.cached_property
    def steps(self) -> list[list[Shape]]:
        """Shapes within one layer before each operation, and after the last; or OpError."""
        shapes = list(self.inputs)
        if self.rule.unstacks:
            shapes = [_without(shape, self.rule.stack_axis) for shape in shapes]
        steps = [shapes]
        for op in self.rule.ops:
            steps.append(op.shapes(steps[-1]))
        return steps

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the targets by name."""
        shapes = self.steps[-1]
        if len(shapes) != len(self.rule.targets):
            raise OpError(f"its operations give {len(shapes)} arrays")
        if self.rule.stacks:
            layers, at = len(self.sources), self.rule.stack_axis
            shapes = [(*shape[:at], layers, *shape[at:]) for shape in shapes]
        return {
            name: shape for names in self.targets for name, shape in zip(names, shapes, strict=True)
        }

    def blocks(self, target: str, start: Shape, view: Any) -> list[tuple[str, WaitingMemory]]:
        """The sources that fill memory of a target.

        Returns:
            The sources' names, with the rectangle of each that a part of the memory waits for.
        """
        layer = next(i for i, names in enumerate(self.targets) if target in names)
        block = WaitingMemory(self.targets[layer].index(target), start, view)
        if not self.rule.stacks:
            return self._back(layer, block)
        at, blocks = self.rule.stack_axis, []
        for i in range(view.shape[at]):
            inner = view[(slice(None),) * at + (i,)]
            layer_block = WaitingMemory(block.which, _without(start, at), inner)
            blocks += self._back(start[at] + i, layer_block)
        return blocks

    def _back(self, layer: int, block: WaitingMemory) -> list[tuple[str, WaitingMemory]]:
        blocks = [block]
        for op, shapes in zip(self.rule.ops[::-1], self.steps[-2::-1], strict=True):
            blocks = op.back(blocks, shapes)
        if not self.rule.unstacks:
            return [(self.sources[layer][waiting.which], waiting) for waiting in blocks]
        at = self.rule.stack_axis
        return [
            (
                self.sources[0][waiting.which],
                WaitingMemory(
                    waiting.which,
                    (*waiting.start[:at], layer, *waiting.start[at:]),
                    waiting.view[(slice(None),) * at + (None,)],
                ),
            )
            for waiting in blocks
        ]


class Matching:
    """The rules applied to names and shapes.

    Args:
        rules: in order; the first that takes a leaf decides, rules of ties come on top.
        sources: shapes of the sources by name.
        expected: shapes of the targets by name, if `like` is given.
        by_target: of several rules that take a leaf, the first whose targets are expected decides.

    Attributes:
        groups: what is to be done.
        dropped: names of sources that a rule drops.
        kept: names of expected targets that a rule keeps as they are.
        errors: what does not fit, a line each.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        sources: Mapping[str, Shape],
        expected: Mapping[str, Shape] | None = None,
        *,
        by_target: bool = False,
    ):
        """See the class."""
        self._rules, self._sources, self._expected = rules, sources, expected
        self._by_target = by_target
        self.groups: list[RuleGroup] = []
        self.dropped: list[str] = []
        self.errors: list[str] = []
        self._takers: dict[tuple[int, tuple[Any, ...]], dict[tuple[int, int], str]] = {}
        for name, shape in sources.items():
            self._take(name, shape)
        for (index, key), slots in self._takers.items():
            self._group(rules[index], dict(key), slots)
        self._check_twice()
        self.kept = self._check_expected() if expected is not None else []

    def _take(self, name: str, shape: Shape) -> None:
        takes = [
            (index, which, captures)
            for index, rule in enumerate(self._rules)
            if rule.rank is None or len(shape) in rule.rank
            for which, pattern in enumerate(rule.sources)
            if (captures := pattern.match(name)) is not None
        ]
        ties = [take for take in takes if self._rules[take[0]].tie]
        first = self._first(name, shape, [take for take in takes if take not in ties])
        for index, which, captures in [*first, *ties]:
            rule = self._rules[index]
            layer = captures.pop(rule.stack) if rule.stacks and rule.stack else "0"
            if not layer.isdecimal():
                self.errors.append(f"{name} {shape}: layer {layer!r} of {rule} is no number")
                continue
            key = (index, tuple(sorted(captures.items())))
            self._takers.setdefault(key, {})[int(layer), which] = name

    def _first(self, name: str, shape: Shape, takes: list[Any]) -> list[Any]:
        """The rule that decides for a leaf, as a list of at most one."""
        if not takes:
            self.errors.append(f"{name} {shape}: no rule takes it")
            return []
        if not self._by_target:
            return takes[:1]
        gives = [self._possible(self._rules[index], captures) for index, _, captures in takes]
        if self._expected is not None:
            for take, names in zip(takes, gives, strict=True):
                if all(name in self._expected for name in names):
                    return [take]
            tried = ", ".join(dict.fromkeys(name for names in gives for name in names))
            self.errors.append(f"{name} {shape}: like has no {tried}")
            return []
        if len({tuple(names) for names in gives}) > 1:
            could = " or ".join(dict.fromkeys(", ".join(names) or "nothing" for names in gives))
            self.errors.append(f"{name} {shape}: could become {could}; pass like= to decide")
            return []
        return takes[:1]

    def _possible(self, rule: Rule, captures: Mapping[str, str]) -> list[str]:
        filled = {rule.stack or "": "0", **captures}
        return [pattern.fill(filled) for pattern in rule.targets]

    def _group(self, rule: Rule, captures: dict[str, str], slots: dict[Any, str]) -> None:
        """Join the leaves of one rule and one set of captures."""
        layers = 1 + max(layer for layer, _ in slots)
        positions = [(i, k) for i in range(layers) for k in range(len(rule.sources))]
        missing = [
            rule.sources[k].fill({**captures, rule.stack or "": str(i)})
            for i, k in positions
            if (i, k) not in slots
        ]
        if missing:
            have = ", ".join(f"{name} {self._sources[name]}" for name in slots.values())
            self.errors.append(f"{have}: {rule} also takes {', '.join(missing)}, which is missing")
            return
        if not rule.targets:
            self.dropped += slots.values()
            return
        sources = tuple(tuple(slots[i, k] for k in range(len(rule.sources))) for i in range(layers))
        layer_shapes = {tuple(self._sources[name] for name in names) for names in sources}
        names = ", ".join(f"{name} {self._sources[name]}" for names in sources for name in names)
        if len(layer_shapes) > 1:
            self.errors.append(f"{names}: layers that {rule} stacks have different shapes")
            return
        inputs = layer_shapes.pop()
        try:
            copies = _layers_of(rule, inputs)
            targets = tuple(
                tuple(p.fill({**captures, rule.stack or "": str(i)}) for p in rule.targets)
                for i in range(copies)
            )
            group = RuleGroup(rule, sources, targets, inputs)
            group.shapes  # noqa: B018  (raises what does not fit)
        except OpError as error:
            self.errors.append(f"{names}: {error} [{rule}]")
            return
        self.groups.append(group)

    def _check_twice(self) -> None:
        """Record an error for each target that several groups make."""
        makers: dict[str, list[RuleGroup]] = {}
        for group in self.groups:
            for names in group.targets:
                for name in names:
                    makers.setdefault(name, []).append(group)
        for name, groups in makers.items():
            if sum(not group.rule.untie for group in groups) > 1:
                both = " and ".join(_format_sources(group, self._sources) for group in groups)
                self.errors.append(f"{name}: made of {both}")

    def _check_expected(self) -> list[str]:
        """Compare with the expected targets; the names that a rule keeps as they are."""
        expected, targets = self._expected or {}, set()
        for group in self.groups:
            for name, shape in group.shapes.items():
                targets.add(name)
                if name not in expected:
                    error = f"{name} {shape}: made of {_format_sources(group, self._sources)}"
                    self.errors.append(f"{error}, which is not in like")
                elif tuple(expected[name]) != shape:
                    error = f"{name}: shape {shape}, but {tuple(expected[name])} in like; made of "
                    error += f"{_format_sources(group, self._sources)} by {group.rule}"
                    self.errors.append(error)
        keep_patterns = [p for rule in self._rules if not rule.sources for p in rule.targets]
        kept = []
        for name, shape in expected.items():
            if name in targets:
                continue
            if any(pattern.match(name) is not None for pattern in keep_patterns):
                kept.append(name)
            else:
                self.errors.append(f"{name} {tuple(shape)}: no rule makes it")
        return kept


def _layers_of(rule: Rule, inputs: tuple[Shape, ...]) -> int:
    """How many layers the targets have."""
    if not rule.unstacks:
        return 1
    if rule.stack_axis >= min(map(len, inputs)):
        raise OpError(f"there is no axis {rule.stack_axis} to unstack")
    return inputs[0][rule.stack_axis]


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _format_sources(group: RuleGroup, shapes: Mapping[str, Shape]) -> str:
    names = [name for layer in group.sources for name in layer]
    return listed([f"{name} {shapes[name]}" for name in names], 3)
