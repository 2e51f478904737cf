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
from collections.abc import Callable, Iterable, Sequence

from .analytic_cost import AnalyticCost, Choice, ChoiceCost, is_tiny

WIDTH = 5
ROUNDS = 12
DIMENSIONS = 12
EACH_RULE = 1e-3
"""What a plan may be slower, relatively, to have one thing less to say."""


AxisUse = tuple[tuple[int, ...], bool]
"""What one mesh axis does: the dimensions that it splits, and whether parameters rest split."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """A choice that was evaluated.

    Attributes:
        choice: it.
        cost: what it costs.
        score: what the search orders by; less is better.
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
        self.seen: dict[Choice, Scored] = {}
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
        self._known = self._weighed()
        self._names = self._alike()

    def begin(self) -> float:
        """Try the starts; gives the best score among them."""
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
            before = {one.choice for one in beam}
            changed = (again for one in beam for again in self._changes(one.choice))
            beam = self._best([*(one.choice for one in beam), *changed], WIDTH)
            if {one.choice for one in beam} == before:
                break
        return self._best(self.seen, count, self.strategy)

    def leanest(self) -> float:
        """The least bytes that a choice needs, of those that were evaluated."""
        return min(plan.cost.memory for plan in self.seen.values())

    def around(self, choice: Choice, count: int) -> list[Scored]:
        """The best choices that differ from one by a single change, and in what they lay out."""

        def what(one: Choice) -> object:
            return self.layouts(one), self.strategy(one)

        same = what(choice)
        near = self._best(self._changes(choice), count + 1, what)
        return [one for one in near if what(one.choice) != same][:count]

    def plain(self) -> dict[str, Scored]:
        """The strategies that people write by hand, each at its best, by name."""
        if not self._batch:
            return {}
        batch, *others = self._batch
        forms: dict[str, list[AxisUse]] = {"data": [((batch,), False)], "FSDP": [((batch,), True)]}
        result = {name: [roles * self._axes] for name, roles in forms.items()}
        if self._axes > 1:
            inner = (tuple(n for n in one if n not in self._batch) for one, _ in self._roles())
            last: list[AxisUse] = [(one, False) for one in dict.fromkeys(inner) if one]
            most, full = (forms[name] * (self._axes - 1) for name in ("FSDP", "data"))
            result["FSDP x tensor"] = [[*most, one] for one in last]
            result["tensor"] = [[*full, one] for one in last]
            result["sequence"] = [[*most, ((other,), True)] for other in others[:1]]
        best = {
            name: self._best(map(self._choice, roles), 1) for name, roles in result.items() if roles
        }
        return {name: scored[0] for name, scored in best.items()}

    def _evaluated(self, choice: Choice) -> Scored:
        found = self.seen.get(choice)
        if found is None:
            cost = self.cost.of(choice)
            odd = sum(min(len(one), len(self._storable - one)) for one in choice.stored)
            complexity = sum(map(len, choice.split)) + sum(map(bool, choice.stored)) + odd
            score = cost.seconds * (1 + EACH_RULE * complexity)
            if cost.memory > self.memory:
                score = (1 + score) * 1e3 * cost.memory / self.memory
            found = Scored(choice, cost, float(f"{score:.9e}"), self._order(choice))
            self.seen[choice] = found
        return found

    def _best(
        self,
        choices: Iterable[Choice],
        count: int,
        differs: Callable[[Choice], object] | None = None,
    ) -> list[Scored]:
        """The best of some choices that differ in what they lay out, or in something else."""
        scored = sorted(
            (self._evaluated(choice) for choice in dict.fromkeys(choices)),
            key=lambda one: (one.score, one.order),
        )
        best: dict[object, Scored] = {}
        for one in scored:
            if len(best) == count:
                break
            best.setdefault((differs or self.layouts)(one.choice), one)
        return list(best.values())

    def layouts(self, choice: Choice) -> object:
        """How each group is laid out, the same for mesh axes that only have other names."""
        layouts = [self.cost.group_layout(n, choice) for n in range(len(self._groups))]
        return min(
            tuple(
                tuple(tuple(sorted(names[n] for n in split)) for split in layout)
                for layout in layouts
            )
            for names in self._names
        )

    def strategy(self, choice: Choice) -> object:
        """What kinds of things each mesh axis splits: two choices of one strategy are cousins."""
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
            features = frozenset(itertools.takewhile(lambda one: one not in self._batch, used))
            mine = tuple(one for one in self._batch if (index, one) in batch)
            along = sum(computed[index, feature] for feature in features)
            most, mainly = 2 * of_axis[index] > full, 2 * along > of_axis[index]
            uses.append(_Uses(mine, most, features, mainly))
        return uses

    def idea(self, choice: Choice) -> str:
        """What each mesh axis splits, in words."""
        names = self.cost.mesh.axis_names
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
            parts = [f"axis {axes[n]} of the batch" if axes[n] else "batch" for n in uses.batch]
            parts += ["features"] if uses.mainly else ["parameters at rest"] if uses.most else []
            ideas.append(" and ".join(dict.fromkeys(parts)) or "a few parameters")
        return ideas

    def _order(self, choice: Choice) -> tuple[object, ...]:
        """Of equal choices the one whose first mesh axes split the batch comes first."""
        first = tuple(self._batch[:1] != list(axis[:1]) for axis in choice.split)
        stored = tuple(tuple(sorted(one)) for one in choice.stored)
        return first, choice.split, stored

    def _alike(self) -> list[tuple[int, ...]]:
        """The other numbers that mesh axes could have without a difference."""
        result = self.cost.rates.alike
        return [
            names
            for names in itertools.permutations(range(self._axes))
            if all(index == other or result(index, other) for index, other in enumerate(names))
        ]

    def _weighed(self) -> list[int]:
        """The dimensions that matter, those of the batch and of most bytes first."""
        weight = collections.Counter[int]()
        for group, size in zip(self._groups, self.cost.program.resting, strict=True):
            for dimension in set(group.dimensions) - {-1}:
                weight[dimension] += size
        rest = sorted(weight, key=lambda group: (-weight[group], group))
        return list(dict.fromkeys([*self._batch, *rest]))[:DIMENSIONS]

    def _roles(self) -> list[tuple[tuple[int, ...], bool]]:
        """What one mesh axis may do: dimensions in order, and whether parameters rest split."""
        meets = collections.defaultdict[int, set[int]](set)
        for group in self._groups:
            if group.role != "input":
                for first, second in itertools.permutations(set(group.dimensions) - {-1}, 2):
                    meets[first].add(second)
        inner = [group for group in self._known if group not in self._batch or meets[group]]
        sets = []
        for start in inner:
            taken = [start]
            for group in inner:
                if group not in taken and not any(group in meets[other] for other in taken):
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
            starts = [self._choice((*one, role)) for one in best_so_far for role in roles]
            if index == self._axes - 1:
                return starts
            by_choice = {
                self._choice((*one, role)): (*one, role) for one in best_so_far for role in roles
            }
            best = self._best(starts, 3 * WIDTH)
            best_so_far = [by_choice[one.choice] for one in best]
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
            for one in self._known:
                if one in split:
                    yield _with_split(choice, index, tuple(n for n in split if n != one))
                else:
                    yield _with_split(choice, index, (one, *split))
                    yield _with_split(choice, index, (*split, one))
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
