"""An operator on lists, traced on one element of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from isoshard.core.runtime._jax_internals.jaxpr_classes import Literal
from isoshard.torch_bridge.engine.signatures.bound_op import BoundOp

from .equation_templates import EquationTemplate, Known, TemplateWriter
from .list_calls import Element, call_of, elements_of


class _Lists(NamedTuple):
    """What was traced.

    Attributes:
        shared: what is computed of no element; `elements` are given its results first.
        elements: by their kind.
    """

    shared: EquationTemplate
    elements: Mapping[Any, EquationTemplate]


class TracedLists:
    """Writes operators on lists, element by element.

    Args:
        writer: of the program.
    """

    def __init__(self, writer: TemplateWriter):
        """See the class."""
        self._writer = writer
        self._found: dict[Any, _Lists | None] = {}

    def write(self, number: int, call: Any, given: Sequence[Known]) -> list[Known] | None:
        """Write a call.

        Args:
            number: of its recipe.
            call: the detail of that.
            given: its tensor arguments, then its lifted floats.

        Returns:
            Its results; None, and nothing is written, of a call that is not on lists, or of whose
            elements one is computed of another.
        """
        elements = elements_of(call)
        if not elements:
            return None
        mine = [[given[place] for place in one.reads] for one in elements]
        kinds = [
            (one.kind, tuple([known.aval for known in its]))
            for one, its in zip(elements, mine, strict=True)
        ]
        first = {kind: place for place, kind in reversed([*enumerate(kinds)])}
        inside = {place for one in elements for place in one.reads}
        rest = [place for place in range(len(given)) if place not in inside]
        key = number, tuple(first), tuple([given[place].aval for place in rest])
        if key not in self._found:
            self._found[key] = self._traced(call, elements, first, rest, given)
        found = self._found[key]
        if found is None:
            return None
        shared = self._writer.write(found.shared, [given[place] for place in rest])
        return [
            self._writer.write(found.elements[kind], [*shared, *its])[0]
            for kind, its in zip(kinds, mine, strict=True)
        ]

    def _traced(
        self,
        call: BoundOp,
        elements: Sequence[Element],
        first: Mapping[Any, int],
        rest: Sequence[int],
        given: Sequence[Known],
    ) -> _Lists | None:
        some, reads = call_of(call, [*first.values()])
        tensors = len(some.ins)

        def isoshard_lists(*arguments: Any) -> list[Any]:
            return some(arguments[:tensors], arguments[tensors:])

        template = self._writer.traced(isoshard_lists, [given[place] for place in reads])
        variables = dict(zip(reads, template.given, strict=True))
        mine = {
            kind: [variables[place] for place in elements[number].reads]
            for kind, number in first.items()
        }
        return self._apart(template, [variables[place] for place in rest], mine)

    def _apart(
        self, template: EquationTemplate, rest: Sequence[Any], mine: Mapping[Any, Sequence[Any]]
    ) -> _Lists | None:
        """A template as what is shared and what belongs to each element, if it can be told apart.

        Args:
            template: with one result for each element, in order.
            rest: variables that it is given beside those of elements.
            mine: those of each element.
        """
        owner = {one: kind for kind, its in mine.items() for one in its}
        alone: list[Any] = []
        inside: dict[Any, list[Any]] = {kind: [] for kind in mine}
        for equation in template.equations:
            owners = {owner[one] for one in _variables(equation.invars) if one in owner}
            if len(owners) > 1 or equation.effects:
                return None
            for kind in owners:
                owner.update(dict.fromkeys(equation.outvars, kind))
            (inside[owners.pop()] if owners else alone).append(equation)
        results = dict(zip(mine, template.results, strict=True))
        read = {one for its in inside.values() for each in its for one in _variables(each.invars)}
        for kind, known in results.items():
            found = _variables([known.atom])
            if any(owner.get(one, kind) != kind for one in found):
                return None
            read.update(found)
        made = [*rest, *[one for equation in alone for one in equation.outvars]]
        shared = [self._writer.known(one) for one in made if one in read]
        passed = [one.atom for one in shared]
        return _Lists(
            EquationTemplate(rest, alone, shared),
            {
                kind: EquationTemplate([*passed, *its], inside[kind], [results[kind]])
                for kind, its in mine.items()
            },
        )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [one for one in atoms if not isinstance(one, Literal)]
