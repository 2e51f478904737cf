"""A step as one list of operations: bodies of loops in their place, with how often they run.

Each value has a stretch of that list in which it is needed. What XLA fuses (an operation by element
with one reader) is not kept: what it is made of is needed in its place.

>>> import jax, jax.numpy as jnp
>>> from ..axes.flat_program import flattened
>>> def step(w, xs):
...     return jax.lax.scan(lambda x, row: (jnp.tanh(w @ x) + row, None), xs[0], xs)[0]
>>> listing = StepListing.of(flattened(jax.make_jaxpr(step)(jnp.ones((4, 4)), jnp.ones((3, 4)))))
>>> [(one.op.name, one.times) for one in listing.ops if one.op.name == "dot_general"]
[('dot_general', 3)]
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from isoshard.core.runtime.jaxprs import is_elementwise

from ..axes.common_expressions import CONSTANT
from ..axes.flat_program import BodyScope, FlatOp, FlatProgram

_FUSED = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy iota name sharding_constraint "
    "slice pad rev edge row optimization_barrier".split()
)


@dataclasses.dataclass(frozen=True)
class ListedOp:
    """One operation and how often a step runs it.

    Attributes:
        op: the operation.
        times: how often.
    """

    op: FlatOp
    times: int


@dataclasses.dataclass
class StepListing:
    """Operations in the order in which they run.

    Attributes:
        flat: the program.
        ops: its operations.
        since: of values, the place from which they take memory.
        until: of values, the last place at which they are needed.
        kept: values that take memory of their own.
        rows: values of which a loop takes rows, or which it stacks: their leading axis is its own.
    """

    flat: FlatProgram
    ops: list[ListedOp]
    since: dict[int, int]
    until: dict[int, int]
    kept: set[int]
    rows: set[int]

    @classmethod
    def of(cls, flat: FlatProgram) -> StepListing:
        """List a program.

        Args:
            flat: it.
        """
        listing = cls(flat, [], dict.fromkeys(flat.inputs, 0), {}, set(), set())
        listing._add(flat.scope, 1)
        listing._needed(flat.results)
        listing._fuse()
        return listing

    def alive(self, place: int) -> Iterator[int]:
        """The values that take memory at a place of the list.

        Args:
            place: in `ops`.
        """
        for value in self.kept:
            if self.since[value] <= place <= self.until.get(value, -1):
                yield value

    def _needed(self, values: Iterable[int]) -> None:
        self.until.update(dict.fromkeys(values, len(self.ops)))

    def _add(self, scope: BodyScope, times: int) -> None:
        for op in scope.ops:
            self.since.update((one, len(self.ops)) for one in op.results if one not in self.since)
            self._needed(op.operands)
            if op.name in ("row", "stack") and op.equation.primitive.name == "scan":
                self.rows.add(op.operands[0] if op.name == "row" else op.results[0])
            self.ops.append(ListedOp(op, times))
            for body in op.bodies:
                if body.kind != "condition":
                    self._add(body, times * body.times)
                    self._needed(body.results)
            if op.bodies:
                self._needed(op.operands)

    def _fuse(self) -> None:
        readers = collections.Counter(one for listed in self.ops for one in set(listed.op.operands))
        results = set(self.flat.results)
        for listed in reversed(self.ops):
            op = listed.op
            light = is_elementwise(op.name) or op.name in _FUSED
            for one in op.results:
                if one not in self.until:
                    continue
                cast = op.name == "convert_element_type" and op.operands[0] in self.flat.inputs
                if light and one not in results and (readers[one] == 1 or cast or not op.operands):
                    for operand in op.operands:
                        if operand != CONSTANT:
                            self.until[operand] = max(self.until[operand], self.until[one])
                elif not op.bodies or op.name not in ("edge",):
                    self.kept.add(one)
