"""Sharding propagation over a jaxpr, from the shardings of inputs and of constraints.

The stages are those of XLA's partitioner Shardy (`BasicPropagation` and `OpPriorityPropagation`):
inputs and constraints are fixed. Then shardings propagate both ways, first through operations that
only pass elements on (elementwise operations, reshapes, values carried by loops), then along all
factors that are neither reduced nor unsharded, then along all. Each stage runs until nothing
changes.
A sharding only grows.

Results are cached by operation and operand shardings, so that a step of eighty equal layers costs
little more than a step of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.kit import is_elementwise

from .factors import BACKWARD, BOTH, FORWARD, NONE, ArraySharding, DimensionRule, Split, agreed
from .flat_program import CONSTANT, BodyScope, FlatOp, FlatProgram

STAGES = 3
_PASSED = frozenset(
    "reshape transpose squeeze expand_dims edge sharding_constraint optimization_barrier name copy "
    "device_put layout_constraint reshard result".split()
)
_SLICED = frozenset(("dynamic_slice", "dynamic_update_slice", "row", "stack"))


class ArrayShardings:
    """Shardings by id: those that occur, with the axes that are closed in each.

    A mesh axis is written as its prime factors, the outermost first, each with an id of its own:
    twelve heads are split by the first two of the three halves of an axis of eight, as Shardy does
    by its sub-axes.

    Args:
        sizes: mesh axes and their sizes, in the mesh's order.

    Attributes:
        sizes: of the sub-axes, by id.
        by_id: sharding and closed axes (as bits) by id.

    Example:
        >>> layouts = ArrayShardings({"data": 8, "model": 3})
        >>> layouts.sizes, layouts.sub_axes("data"), layouts.axes((1, 3))
        ((2, 2, 2, 3), (0, 1, 2), ('data', 'model'))
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """No sharding has an id yet."""
        owners = [(name, prime) for name, size in sizes.items() for prime in _primes(size)]
        self.sizes = tuple([prime for _, prime in owners])
        self._owners = tuple([name for name, _ in owners])
        self._sub_axes = {
            name: tuple([n for n, (owner, _) in enumerate(owners) if owner == name])
            for name in sizes
        }
        self._ids: dict[tuple[ArraySharding, int], int] = {}
        self.by_id: list[tuple[ArraySharding, int]] = []

    def id_of(self, layout: ArraySharding, closed: int = 0) -> int:
        """The id of a sharding with closed axes."""
        key = layout, closed
        layout_id = self._ids.get(key)
        if layout_id is None:
            layout_id = self._ids[key] = len(self.by_id)
            self.by_id.append(key)
        return layout_id

    def of_spec(self, spec: PartitionSpec, rank: int) -> int:
        """The id of a `PartitionSpec`; its UNCONSTRAINED axes are open."""
        entries = (*spec, *(None,) * rank)[:rank]
        layout: list[Split] = []
        closed = 0
        for axis, entry in enumerate(entries):
            if entry is PartitionSpec.UNCONSTRAINED:
                layout.append(())
                continue
            closed |= 1 << axis
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            layout.append(tuple([sub_axis for name in names for sub_axis in self._sub_axes[name]]))
        return self.id_of(tuple(layout), closed)

    def sub_axes(self, name: str) -> Split:
        """The ids of a mesh axis."""
        return self._sub_axes[name]

    def axes(self, split: Iterable[int]) -> tuple[str, ...]:
        """Names of mesh axes, in the mesh's order."""
        return tuple(dict.fromkeys([self._owners[axis] for axis in sorted(split)]))


def _primes(size: int) -> list[int]:
    primes, prime = [], 2
    while size > 1:
        if size % prime:
            prime += 1
        else:
            primes.append(prime)
            size //= prime
    return primes


def propagate(
    flat: FlatProgram,
    layouts: ArrayShardings,
    input_layouts: Mapping[int, int],
    target: Sequence[NamedSharding | None] = (),
) -> list[ArraySharding]:
    """Propagate shardings to all values.

    Args:
        flat: the program.
        layouts: of the mesh.
        input_layouts: input value -> id of its sharding in `layouts`.
        target: of results; None leaves one to what reaches it.

    Returns:
        The sharding of each value; those of constrained results come after the program's values.
    """
    states = [layouts.id_of(((),) * len(shape)) for shape in flat.shapes]
    for value, state in input_layouts.items():
        states[value] = state
    ops = list(_in_order(flat.scope, flat.results))
    for op in ops:
        if op.name in ("sharding_constraint", "reshard"):
            spec = getattr(op.equation.params.get("sharding"), "spec", None)
            if spec is not None:
                states[op.results[0]] = layouts.of_spec(spec, len(flat.shapes[op.results[0]]))
        elif op.bodies and op.bodies[0].kind == "manual":
            for value, spec in zip(op.results, op.equation.params["out_specs"], strict=True):
                states[value] = layouts.of_spec(spec, len(flat.shapes[value]))
    ops = [op for op in ops if not op.bodies] + _results(flat, layouts, states, target)
    _Propagation(layouts, states, ops).run()
    return [layouts.by_id[state][0] for state in states]


def _results(
    flat: FlatProgram,
    layouts: ArrayShardings,
    states: list[int],
    target: Sequence[NamedSharding | None],
) -> list[FlatOp]:
    """An operation for each constrained result, whose result has that sharding."""
    results = []
    for value, sharding in zip(flat.results, target, strict=False):
        if sharding is not None and value != CONSTANT:
            rank = len(flat.shapes[value])
            states.append(layouts.of_spec(sharding.spec, rank))
            axes = tuple((n,) for n in range(rank))
            rule = DimensionRule((axes,), (axes,), flat.shapes[value])
            results.append(FlatOp("result", None, rule, (value,), (len(states) - 1,)))
    return results


def _in_order(scope: BodyScope, results: Sequence[int]) -> Iterable[FlatOp]:
    """Operations as XLA writes them: what the first result needs first, and of that likewise."""
    maker = {value: op for op in scope.ops for value in op.results}
    done: set[int] = set()
    for root in (*(maker[result] for result in results if result in maker), *scope.ops):
        stack = [(root, False)]
        while stack:
            op, ready = stack.pop()
            if ready:
                yield op
                for body in op.bodies:
                    yield from _in_order(body, body.results)
            elif id(op) not in done:
                done.add(id(op))
                stack.append((op, True))
                for value in reversed(op.operands):
                    if value in maker and id(maker[value]) not in done:
                        stack.append((maker[value], False))


class _Propagation:
    def __init__(self, layouts: ArrayShardings, states: list[int], ops: list[FlatOp]) -> None:
        self.layouts = layouts
        self.states = states
        self.rules: list[tuple[DimensionRule, str]] = []
        self.operations: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.caches: list[dict[tuple[int, ...], tuple[int, ...]]] = []
        self.users: dict[int, list[int]] = {}
        # Rules of equal operations are the same object, and operations keep them alive.
        indices: dict[tuple[int, str, tuple[int, ...]], int] = {}
        for op_index, op in enumerate(ops):
            kind = _kind(op)
            operands = tuple([n for n, operand in enumerate(op.operands) if operand != CONSTANT])
            key = (id(op.rule), kind, operands)
            rule_index = indices.get(key)
            if rule_index is None:
                rule_index = indices[key] = len(self.rules)
                self.rules.append((_only(op.rule, operands), kind))
                self.caches.append({})
            values = tuple([op.operands[n] for n in operands])
            self.operations.append((rule_index, values, op.results))
            for value in {*values, *op.results}:
                self.users.setdefault(value, []).append(op_index)

    def run(self) -> None:
        for stage in range(STAGES):
            self.directions = [_directions(rule, kind, stage) for rule, kind in self.rules]
            for cache in self.caches:
                cache.clear()
            # As MLIR's greedy driver: in the program's order, but an operation that was visited is
            # visited again at once when a sharding that it reads or writes changes.
            waiting = list(range(len(self.operations) - 1, -1, -1))
            waits = bytearray(b"\1") * len(self.operations)
            while waiting:
                op_index = waiting.pop()
                waits[op_index] = 0
                self._visit(op_index, waiting, waits)

    def _visit(self, op_index: int, waiting: list[int], waits: bytearray) -> None:
        rule_index, operands, results = self.operations[op_index]
        states = self.states
        before = tuple([states[value] for value in (*operands, *results)])
        after = self.caches[rule_index].get(before)
        if after is None:
            after = self._agreed(rule_index, before, len(operands))
            self.caches[rule_index][before] = after
        if after == before:
            return
        for value, old, new in zip((*operands, *results), before, after, strict=True):
            if new != old and states[value] == old:
                states[value] = new
                for user in self.users[value]:
                    if not waits[user]:
                        waits[user] = 1
                        waiting.append(user)

    def _agreed(self, rule_index: int, before: tuple[int, ...], operands: int) -> tuple[int, ...]:
        directions = self.directions[rule_index]
        if not any(directions):
            return before
        by_id = self.layouts.by_id
        arrays = [by_id[layout_id] for layout_id in before]
        first, second = agreed(
            self.rules[rule_index][0],
            directions,
            arrays[:operands],
            arrays[operands:],
            self.layouts.sizes,
        )
        return tuple(
            self.layouts.id_of(layout, closed)
            for layout, (_, closed) in zip((*first, *second), arrays, strict=True)
        )


def _kind(op: FlatOp) -> str:
    if op.name in _PASSED or is_elementwise(op.name):
        return "passed"
    if op.name in _SLICED:
        return "sliced"
    if op.name != "broadcast_in_dim":
        return ""
    # One that only adds axes of size 1 is a reshape.
    (before,), (after,) = op.rule.operands, op.rule.results
    present = {factor for axis in before for factor in axis}
    new = [op.rule.sizes[factor] for axis in after for factor in axis if factor not in present]
    return "broadcast" if any(size > 1 for size in new) else "passed"


def _directions(rule: DimensionRule, kind: str, stage: int) -> list[int]:
    """For each factor, the direction in which shardings propagate at a stage."""
    if stage == 2 or kind == "passed":
        return [BOTH] * len(rule.sizes)
    if stage == 0:
        return [FORWARD if kind == "sliced" else NONE] * len(rule.sizes)
    directions = BACKWARD if kind == "broadcast" else BOTH
    fixed = rule.reduced | rule.unsharded
    rest = FORWARD if kind == "sliced" else NONE
    return [rest if factor in fixed else directions for factor in range(len(rule.sizes))]


def _only(rule: DimensionRule, operands: tuple[int, ...]) -> DimensionRule:
    """The rule without operands that are constants."""
    if len(operands) == len(rule.operands):
        return rule
    only = tuple(rule.operands[n] for n in operands)
    return DimensionRule(only, rule.results, rule.sizes, rule.reduced, rule.unsharded)
