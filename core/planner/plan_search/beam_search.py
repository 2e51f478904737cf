"""The search: good starts by structure, then small changes to the best few, until none helps.

For each mesh axis a *role* is what it may do: split a dimension of the batch, with or without
parameters at rest; or split dimensions of parameters that never meet in one parameter, as Megatron
splits heads, hidden features and the vocabulary, with or without the sequence in between. Roles are
tried axis by axis, the best combinations are kept. What remains is changed a dimension, or a group
of parameters, at a time.

The result says how far it is from a bound that no plan can beat: every device computing all the
time, without a byte of traffic.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from .analytic_cost import AnalyticCost, Choice, ChoiceCost

WIDTH = 6
ROUNDS = 24
DIMENSIONS = 14
SMALL = 1 << 16
"""Parameters of fewer bytes are not worth resting split."""
EACH_RULE = 2e-4
"""What a plan may be slower, relatively, to have one thing less to say."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A choice that was evaluated.

    Attributes:
        choice: it.
        cost: what it costs.
        score: what the search orders by; less is better.
    """

    choice: Choice
    cost: ChoiceCost
    score: float


class BeamSearch:
    """The search over one mesh.

    Args:
        cost: the cost function.
        memory: bytes that one device has.
    """

    def __init__(self, cost: AnalyticCost, memory: float) -> None:
        """Nothing is evaluated yet."""
        self.cost = cost
        self.memory = memory
        self.seen: dict[Choice, Scored] = {}
        self._axes = len(cost.sizes)
        groups = cost.program.dimensions.groups
        self._groups = groups
        self._storable = frozenset(
            n
            for n, (one, size) in enumerate(zip(groups, cost.program.resting, strict=True))
            if one.role != "input" and size > SMALL and n not in cost.forced
        )
        self._batch = _distinct(
            one for group in groups if group.role == "input" for one in group.dimensions
        )
        self._known = self._weighed()

    def run(self, count: int = WIDTH) -> list[Scored]:
        """Find the best choices.

        Args:
            count: how many to give.

        Returns:
            The best, best first; of those that lay out parameters and batch alike the best one.
        """
        beam = self._best(self._starts(), WIDTH)
        for _ in range(ROUNDS):
            before = {one.choice for one in beam}
            changed = (again for one in beam for again in self._changes(one.choice))
            beam = self._best([*(one.choice for one in beam), *changed], WIDTH)
            if {one.choice for one in beam} == before:
                break
        return self._best(self.seen, count)

    def _evaluated(self, choice: Choice) -> Scored:
        found = self.seen.get(choice)
        if found is None:
            cost = self.cost.of(choice)
            said = sum(map(len, choice.split)) + sum(map(bool, choice.stored))
            score = cost.seconds * (1 + EACH_RULE * said)
            if cost.memory > self.memory:
                score = (1 + score) * 1e3 * cost.memory / self.memory
            found = self.seen[choice] = Scored(choice, cost, score)
        return found

    def _best(self, choices: Iterable[Choice], count: int) -> list[Scored]:
        """The best of some choices that differ in what they lay out."""
        scored = sorted(
            (self._evaluated(one) for one in dict.fromkeys(choices)),
            key=lambda one: (one.score, _key(one.choice)),
        )
        kept: dict[tuple[object, ...], Scored] = {}
        for one in scored:
            if len(kept) == count:
                break
            kept.setdefault(self.layouts(one.choice), one)
        return list(kept.values())

    def layouts(self, choice: Choice) -> tuple[object, ...]:
        """How each group is laid out.

        Args:
            choice: what is chosen.
        """
        return tuple(self.cost.group_layout(n, choice) for n in range(len(self._groups)))

    def _weighed(self) -> list[int]:
        """The dimensions that matter, those of the batch and of most bytes first."""
        weight = collections.Counter[int]()
        for one, size in zip(self._groups, self.cost.program.resting, strict=True):
            for dimension in set(one.dimensions) - {-1}:
                weight[dimension] += size
        rest = sorted(weight, key=lambda one: (-weight[one], one))
        return list(dict.fromkeys([*self._batch, *rest]))[:DIMENSIONS]

    def _roles(self) -> list[tuple[tuple[int, ...], bool]]:
        """What one mesh axis may do: dimensions in order, and whether parameters rest split."""
        meets = collections.defaultdict[int, set[int]](set)
        for one in self._groups:
            if one.role != "input":
                for first, second in itertools.permutations(set(one.dimensions) - {-1}, 2):
                    meets[first].add(second)
        inner = [one for one in self._known if one not in self._batch or meets[one]]
        sets = []
        for start in inner:
            taken = [start]
            for one in inner:
                if one not in taken and not any(one in meets[other] for other in taken):
                    taken.append(one)
            sets.append(tuple(sorted(taken, key=inner.index)))
        roles: list[tuple[tuple[int, ...], bool]] = [((), False), ((), True)]
        roles += [((one,), stored) for one in self._batch for stored in (False, True)]
        for one in dict.fromkeys(sets):
            roles.append((one, False))
            for batch in self._batch:
                if batch not in one:
                    roles += [((*one, batch), False), ((*one, batch), True)]
        return list(dict.fromkeys(roles))

    def _starts(self) -> list[Choice]:
        none: tuple[tuple[tuple[int, ...], bool], ...] = ()
        kept = [none]
        roles = self._roles()
        for number in range(self._axes):
            made = [self._choice((*one, role)) for one in kept for role in roles]
            if number == self._axes - 1:
                return made
            by_choice = {self._choice((*one, role)): (*one, role) for one in kept for role in roles}
            best = self._best(made, 3 * WIDTH)
            kept = [by_choice[one.choice] for one in best]
            plain = [((batch,), False) for batch in self._batch[:2]]
            kept += [(*(plain[:1] * number), role) for role in (*plain, ((), False))]
            kept = list(dict.fromkeys(kept))
        return [self._choice(())]

    def _choice(self, roles: Sequence[tuple[tuple[int, ...], bool]]) -> Choice:
        rest = self._axes - len(roles)
        split = tuple(one for one, _ in roles) + ((),) * rest
        stored = tuple(self._storable if stored else frozenset[int]() for _, stored in roles)
        return Choice(split, stored + (frozenset[int](),) * rest)

    def _changes(self, choice: Choice) -> Iterable[Choice]:
        for number in range(self._axes):
            split, stored = choice.split[number], choice.stored[number]
            for one in self._known:
                if one in split:
                    yield _with_split(choice, number, tuple(n for n in split if n != one))
                else:
                    yield _with_split(choice, number, (one, *split))
                    yield _with_split(choice, number, (*split, one))
            if stored != self._storable:
                yield _with_stored(choice, number, self._storable)
            if stored:
                yield _with_stored(choice, number, frozenset())
            for group in sorted(self._storable):
                yield _with_stored(choice, number, stored ^ {group})
            for other in range(number + 1, self._axes):
                swapped = list(range(self._axes))
                swapped[number], swapped[other] = other, number
                yield Choice(
                    tuple(choice.split[n] for n in swapped),
                    tuple(choice.stored[n] for n in swapped),
                )


def _with_split(choice: Choice, number: int, split: tuple[int, ...]) -> Choice:
    changed = (*choice.split[:number], split, *choice.split[number + 1 :])
    return dataclasses.replace(choice, split=changed)


def _with_stored(choice: Choice, number: int, stored: frozenset[int]) -> Choice:
    changed = (*choice.stored[:number], stored, *choice.stored[number + 1 :])
    return dataclasses.replace(choice, stored=changed)


def _key(choice: Choice) -> tuple[object, ...]:
    return choice.split, tuple(tuple(sorted(one)) for one in choice.stored)


def _distinct(dimensions: Iterable[int]) -> list[int]:
    return [one for one in dict.fromkeys(dimensions) if one >= 0]
