"""Beam search: structured starts, then single changes to the best few choices until none helps.

For each mesh axis a *role* is what it may do: split a dimension of the batch, with or without
parameters (FSDP); or split dimensions of which no parameter has two, as Megatron splits heads,
hidden features and the vocabulary, with or without the sequence in between. Roles are tried axis
by axis, and the best combinations kept. Then a dimension, or a group of parameters, is changed at
a time.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from .analytic_cost import AnalyticCost, Choice, ChoiceCost, is_tiny

WIDTH = 5
ROUNDS = 12
DIMENSIONS = 12
EACH_RULE = 1e-3
"""How much slower, relatively, a plan may be for each rule that it saves."""


AxisUse = tuple[tuple[int, ...], bool]
"""The role of a mesh axis: the dimensions it splits, and whether parameters are stored split."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A choice that was evaluated.

    Attributes:
        choice: the choice.
        cost: its cost.
        score: the search's order; less is better.
        order: of equal scores the least of these comes first.
    """

    choice: Choice
    cost: ChoiceCost
    score: float
    order: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Uses:
    """What one mesh axis splits: dimensions of the batch, most of the parameters, features.

    `mainly` says whether most of those parameters are split along the features.
    """

    batch: tuple[int, ...]
    most: bool
    features: frozenset[int]
    mainly: bool


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
        self.scores: dict[Choice, Scored] = {}
        self._beam: list[Scored] = []
        self._axes = len(cost.sizes)
        groups = cost.program.dimensions.groups
        self._groups = groups
        self._storable = frozenset(
            n
            for n, group in enumerate(groups)
            if group.role != "input" and n not in cost.forced and not is_tiny(group)
        )
        full = sum(cost.program.resting)
        self._large = [n for n in sorted(self._storable) if cost.program.resting[n] > full / 100]
        self._heavy = {
            dimension
            for dimension in {dimension for group in groups for dimension in group.dimensions}
            if sum(
                size
                for group, size in zip(groups, cost.program.resting, strict=True)
                if dimension in group.dimensions
            )
            > full / 10
        }
        self._batch = _distinct(
            dimension for group in groups if group.role == "input" for dimension in group.dimensions
        )
        self._dimensions = self._dimensions_by_weight()
        self._permutations = self._symmetries()

    def begin(self) -> float:
        """Evaluate the starting choices; returns the best score among them."""
        self._beam = self._best(self._starts(), WIDTH)
        return self._beam[0].score

    def run(self, count: int = WIDTH) -> list[Scored]:
        """Find the best choices.

        Returns:
            The best, best first; of each strategy the best one.
        """
        if not self._beam:
            self.begin()
        beam = self._beam
        for _ in range(ROUNDS):
            before = {scored.choice for scored in beam}
            changed = (again for scored in beam for again in self._changes(scored.choice))
            beam = self._best([*(scored.choice for scored in beam), *changed], WIDTH)
            if {scored.choice for scored in beam} == before:
                break
        return self._best(self.scores, count, self.strategy)

    def leanest(self) -> float:
        """The least memory of the choices that were evaluated, in bytes."""
        return min(plan.cost.memory for plan in self.scores.values())

    def around(self, choice: Choice, count: int) -> list[Scored]:
        """The best choices one change away that differ in a sharding or in strategy."""

        def key(other: Choice) -> object:
            return self.layouts(other), self.strategy(other)

        same = key(choice)
        near = self._best(self._changes(choice), count + 1, key)
        return [scored for scored in near if key(scored.choice) != same][:count]

    def plain(self) -> dict[str, Scored]:
        """The strategies that people write by hand, each at its best, by name."""
        if not self._batch:
            return {}
        batch, *others = self._batch
        forms: dict[str, list[AxisUse]] = {"data": [((batch,), False)], "FSDP": [((batch,), True)]}
        result = {name: [roles * self._axes] for name, roles in forms.items()}
        if self._axes > 1:
            inner = (tuple(n for n in split if n not in self._batch) for split, _ in self._roles())
            last: list[AxisUse] = [(split, False) for split in dict.fromkeys(inner) if split]
            most, full = (forms[name] * (self._axes - 1) for name in ("FSDP", "data"))
            result["FSDP x tensor"] = [[*most, use] for use in last]
            result["tensor"] = [[*full, use] for use in last]
            result["sequence"] = [[*most, ((other,), True)] for other in others[:1]]
        best = {
            name: self._best(map(self._choice, roles), 1) for name, roles in result.items() if roles
        }
        return {name: scored[0] for name, scored in best.items()}

    def _evaluated(self, choice: Choice) -> Scored:
        scored = self.scores.get(choice)
        if scored is None:
            cost = self.cost.of(choice)
            odd = sum(min(len(groups), len(self._storable - groups)) for groups in choice.stored)
            complexity = sum(map(len, choice.split)) + sum(map(bool, choice.stored)) + odd
            score = cost.seconds * (1 + EACH_RULE * complexity)
            if cost.memory > self.memory:
                score = (1 + score) * 1e3 * cost.memory / self.memory
            scored = Scored(choice, cost, float(f"{score:.9e}"), self._order(choice))
            self.scores[choice] = scored
        return scored

    def _best(
        self,
        choices: Iterable[Choice],
        count: int,
        differs: Callable[[Choice], object] | None = None,
    ) -> list[Scored]:
        """The best of some choices, one for each key of `differs`, by default their shardings."""
        ranked = sorted(
            (self._evaluated(choice) for choice in dict.fromkeys(choices)),
            key=lambda scored: (scored.score, scored.order),
        )
        best: dict[object, Scored] = {}
        for scored in ranked:
            if len(best) == count:
                break
            best.setdefault((differs or self.layouts)(scored.choice), scored)
        return list(best.values())

    def layouts(self, choice: Choice) -> object:
        """The shardings of all groups, the same for any order of interchangeable mesh axes."""
        layouts = [self.cost.group_layout(n, choice) for n in range(len(self._groups))]
        return min(
            tuple(
                tuple(tuple(sorted(names[n] for n in split)) for split in layout)
                for layout in layouts
            )
            for names in self._permutations
        )

    def strategy(self, choice: Choice) -> object:
        """What each mesh axis splits, by kinds: the batch, most parameters, features."""
        return frozenset(
            (use.batch, use.most, use.features & self._heavy or bool(use.features))
            for use in self._uses(choice)
        )

    def _uses(self, choice: Choice) -> list[_Uses]:
        layouts = [self.cost.group_layout(n, choice) for n in range(len(self._groups))]
        resting = self.cost.program.resting
        batch, computed = set[tuple[int, int]](), collections.Counter[tuple[int, int]]()
        of_axis = [0] * self._axes
        for group, layout, size in zip(self._groups, layouts, resting, strict=True):
            for dimension, split in zip(group.dimensions, layout, strict=True):
                for index in split:
                    if group.role == "input":
                        batch.add((index, dimension))
                    else:
                        computed[index, dimension] += size
                        of_axis[index] += size
        full = sum(
            size for group, size in zip(self._groups, resting, strict=True) if group.role != "input"
        )
        uses = []
        for index, split in enumerate(choice.split):
            used = [axis for axis in split if (index, axis) in batch or (index, axis) in computed]
            features = frozenset(
                itertools.takewhile(lambda dimension: dimension not in self._batch, used)
            )
            batch_dimensions = tuple(
                dimension for dimension in self._batch if (index, dimension) in batch
            )
            feature_bytes = sum(computed[index, feature] for feature in features)
            most, mainly = 2 * of_axis[index] > full, 2 * feature_bytes > of_axis[index]
            uses.append(_Uses(batch_dimensions, most, features, mainly))
        return uses

    def idea(self, choice: Choice) -> str:
        """What each mesh axis splits, in words."""
        names, sizes = self.cost.mesh.axis_names, self.cost.sizes
        ideas = zip(names, sizes, self._ideas(choice), strict=True)
        return "; ".join(f"{name} splits {idea}" for name, size, idea in ideas if size > 1)

    def kind(self, choice: Choice) -> object:
        """What mesh axes split, in words, whichever of them does it."""
        return frozenset(self._ideas(choice))

    def _ideas(self, choice: Choice) -> list[str]:
        axes = {
            dimension: axis
            for group in reversed(self._groups)
            if group.role == "input"
            for axis, dimension in enumerate(group.dimensions)
        }
        ideas = []
        for uses in self._uses(choice):
            terms = [f"axis {axes[n]} of the batch" if axes[n] else "batch" for n in uses.batch]
            terms += ["features"] if uses.mainly else ["parameters at rest"] if uses.most else []
            ideas.append(" and ".join(dict.fromkeys(terms)) or "a few parameters")
        return ideas

    def _order(self, choice: Choice) -> tuple[object, ...]:
        """The order of choices of equal score: first mesh axes split the batch."""
        first = tuple(self._batch[:1] != list(axis[:1]) for axis in choice.split)
        stored = tuple(tuple(sorted(groups)) for groups in choice.stored)
        return first, choice.split, stored

    def _symmetries(self) -> list[tuple[int, ...]]:
        """The permutations of mesh axes that change no cost."""
        same = self.cost.rates.interchangeable
        return [
            order
            for order in itertools.permutations(range(self._axes))
            if all(index == other or same(index, other) for index, other in enumerate(order))
        ]

    def _dimensions_by_weight(self) -> list[int]:
        """The dimensions to split: those of the batch, then those of most bytes."""
        weight = collections.Counter[int]()
        for group, size in zip(self._groups, self.cost.program.resting, strict=True):
            for dimension in set(group.dimensions) - {-1}:
                weight[dimension] += size
        rest = sorted(weight, key=lambda group: (-weight[group], group))
        return list(dict.fromkeys([*self._batch, *rest]))[:DIMENSIONS]

    def _roles(self) -> list[tuple[tuple[int, ...], bool]]:
        """The roles that a mesh axis may have, without repeats."""
        paired = collections.defaultdict[int, set[int]](set)
        for group in self._groups:
            if group.role != "input":
                for first, second in itertools.permutations(set(group.dimensions) - {-1}, 2):
                    paired[first].add(second)
        inner = [group for group in self._dimensions if group not in self._batch or paired[group]]
        sets = []
        for start in inner:
            taken = [start]
            for group in inner:
                if group not in taken and not any(group in paired[other] for other in taken):
                    taken.append(group)
            sets.append(tuple(sorted(taken, key=inner.index)))
        roles: list[tuple[tuple[int, ...], bool]] = [((), False), ((), True)]
        roles += [((group,), stored) for group in self._batch for stored in (False, True)]
        for group in dict.fromkeys(sets):
            roles.append((group, False))
            for batch in self._batch:
                if batch not in group:
                    roles += [((*group, batch), False), ((*group, batch), True)]
        return list(dict.fromkeys(roles))

    def _starts(self) -> list[Choice]:
        none: tuple[tuple[tuple[int, ...], bool], ...] = ()
        best_so_far = [none]
        roles = self._roles()
        for index in range(self._axes):
            starts = [self._choice((*prefix, role)) for prefix in best_so_far for role in roles]
            if index == self._axes - 1:
                return starts
            by_choice = {
                self._choice((*prefix, role)): (*prefix, role)
                for prefix in best_so_far
                for role in roles
            }
            best = self._best(starts, 3 * WIDTH)
            best_so_far = [by_choice[scored.choice] for scored in best]
            plain = [((batch,), False) for batch in self._batch[:2]]
            best_so_far += [(*(plain[:1] * index), role) for role in (*plain, ((), False))]
            best_so_far = list(dict.fromkeys(best_so_far))
        return [self._choice(())]

    def _choice(self, roles: Sequence[tuple[tuple[int, ...], bool]]) -> Choice:
        rest = self._axes - len(roles)
        split = tuple(role for role, _ in roles) + ((),) * rest
        stored = tuple(self._storable if stored else frozenset[int]() for _, stored in roles)
        return Choice(split, stored + (frozenset[int](),) * rest)

    def _changes(self, choice: Choice) -> Iterable[Choice]:
        for index in range(self._axes):
            split, stored = choice.split[index], choice.stored[index]
            for dimension in self._dimensions:
                if dimension in split:
                    yield _with_split(choice, index, tuple(n for n in split if n != dimension))
                else:
                    yield _with_split(choice, index, (dimension, *split))
                    yield _with_split(choice, index, (*split, dimension))
            if stored != self._storable:
                yield _with_stored(choice, index, self._storable)
            if stored:
                yield _with_stored(choice, index, frozenset())
            for group in self._large:
                yield _with_stored(choice, index, stored ^ {group})
            for other in range(index + 1, self._axes):
                swapped = list(range(self._axes))
                swapped[index], swapped[other] = other, index
                yield Choice(
                    tuple(choice.split[n] for n in swapped),
                    tuple(choice.stored[n] for n in swapped),
                )


def _with_split(choice: Choice, index: int, split: tuple[int, ...]) -> Choice:
    changed = (*choice.split[:index], split, *choice.split[index + 1 :])
    return dataclasses.replace(choice, split=changed)


def _with_stored(choice: Choice, index: int, stored: frozenset[int]) -> Choice:
    changed = (*choice.stored[:index], stored, *choice.stored[index + 1 :])
    return dataclasses.replace(choice, stored=changed)


def _distinct(dimensions: Iterable[int]) -> list[int]:
    return [dimension for dimension in dict.fromkeys(dimensions) if dimension >= 0]
