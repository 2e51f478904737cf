"""Rules: which weights of one model become which of the other, and by what operations.

>>> rule = Rule("h.{i}.fc.weight", "blocks.{i}.up.kernel", Kernel())
>>> rule.reversed
Rule('blocks.{i}.up.kernel', 'h.{i}.fc.weight', Kernel(undo=True))

Several sources become one target, or one source several targets:

>>> fused = Rule(["h.{i}.q", "h.{i}.k", "h.{i}.v"], "blocks.{i}.qkv", Concat(0))

Layers that one side stacks (a scanned Flax model) have a capture on the other side only:

>>> Rule("h.{layer}.norm.weight", "blocks.norm.scale", stack="layer").stacks
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .joining import Concat, Split
from .name_patterns import Pattern
from .ops import Kernel as Kernel
from .ops import Op
from .weight_errors import WeightError


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Rule:
    """One rule. Immutable and hashable.

    Args:
        sources: a pattern of names (see `Pattern`), or several whose weights are joined. None: the
            targets are no weights and keep what they are (random state).
        targets: likewise. None: the sources have no counterpart and are dropped.
        *ops: operations from sources to targets, one after the other.
        stack: a capture of one side only, which counts layers 0, 1, ..; the other side holds them
            as one array.
        stack_axis: of that array.
        rank: of the sources; others are not meant. A number, or several.
        tie: the source becomes these targets as well as those of another rule. On the way back the
            targets must be what the tied weight gives, bit for bit, and are dropped.
        untie: what `reversed` makes of `tie`; not for a rule of your own.

    Raises:
        WeightError: a capture is on one side only, or several sources and several targets are
            given.

    Example:
        >>> Rule("h.{i}.fc.weight", "blocks.{j}.up.kernel", Kernel())
        Traceback (most recent call last):
            ...
        isoshard.core.weights.weight_errors.WeightError: Rule('h.{i}.fc.weight', 'blocks.{j}.up.kernel', Kernel()) cannot be used: the captures i, j are not in every pattern
    """  # noqa: E501

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    ops: tuple[Op, ...]
    stack: str | None
    stack_axis: int
    rank: tuple[int, ...] | None
    tie: bool
    untie: bool

    def __init__(
        self,
        sources: str | Sequence[str] | None,
        targets: str | Sequence[str] | None,
        *ops: Op,
        stack: str | None = None,
        stack_axis: int = 0,
        rank: int | Sequence[int] | None = None,
        tie: bool = False,
        untie: bool = False,
    ):
        """See the class."""
        fields = {
            "sources": _patterns(sources),
            "targets": _patterns(targets),
            "stack": stack,
            "stack_axis": stack_axis,
            "rank": (rank,) if isinstance(rank, int) else rank and tuple(rank),
            "tie": tie,
            "untie": untie,
        }
        count = max(len(fields["sources"]), len(fields["targets"]))
        fields["ops"] = tuple(_counted(op, count) for op in ops)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        patterns = (*self.sources, *self.targets)
        wrong = []
        if not self.sources and not self.targets:
            wrong.append("it has neither sources nor targets")
        if min(len(self.sources), len(self.targets)) > 1:
            wrong.append("several sources become one target, or one source several targets")
        if self.sources and self.targets:
            sides = [pattern.captures - {self.stack} for pattern in patterns]
            odd = sorted(frozenset.union(*sides) - frozenset.intersection(*sides))
            if odd:
                wrong.append(f"the captures {', '.join(odd)} are not in every pattern")
            in_left = {self.stack in pattern.captures for pattern in self.sources}
            in_right = {self.stack in pattern.captures for pattern in self.targets}
            if self.stack and sorted((*in_left, *in_right)) != [False, True]:
                wrong.append(f"stack={self.stack!r} is no capture of one side only")
        for op in self.ops:
            if not isinstance(op, Op):
                wrong.append(f"{op!r} is no operation")
        if wrong:
            raise WeightError(f"{self} cannot be used: {'; '.join(wrong)}")

    @property
    def stacks(self) -> bool:
        """Whether the sources are layers, and the target holds them as one."""
        return bool(self.stack) and any(self.stack in p.captures for p in self.sources)

    @property
    def unstacks(self) -> bool:
        """Whether the targets are layers, and the source holds them as one."""
        return bool(self.stack) and not self.stacks

    @property
    def reversed(self) -> Rule:
        """The rule from targets to sources."""
        ops = [op.inverse for op in reversed(self.ops)]
        return Rule(
            [pattern.text for pattern in self.targets] or None,
            [pattern.text for pattern in self.sources] or None,
            *ops,
            stack=self.stack,
            stack_axis=self.stack_axis,
            tie=self.untie,
            untie=self.tie,
        )

    def __repr__(self) -> str:
        """The constructor's call."""
        args = [_repr(self.sources), _repr(self.targets), *map(repr, self.ops)]
        for name, default in (
            ("stack", None),
            ("stack_axis", 0),
            ("rank", None),
            ("tie", False),
            ("untie", False),
        ):
            value = getattr(self, name, default)
            args += [f"{name}={value!r}"] if value != default else []
        return f"Rule({', '.join(args)})"


def _patterns(names: str | Sequence[str] | None) -> tuple[Pattern, ...]:
    texts = () if names is None else (names,) if isinstance(names, str) else names
    return tuple(Pattern(text) for text in texts)


def _counted(op: Any, count: int) -> Any:
    """`op`; a `Concat` or `Split` without sizes gets the number of its arrays."""
    if isinstance(op, Concat | Split) and op.count is None and op.sizes is None:
        return dataclasses.replace(op, count=count)
    return op


def _repr(patterns: Sequence[Pattern]) -> str:
    texts = [pattern.text for pattern in patterns]
    return repr(texts[0] if len(texts) == 1 else texts or None)
