"""An operator on lists, traced on one element of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from isoshard.core.runtime._jax_internals.jaxpr_classes import Literal
from isoshard.torch_bridge.engine.signatures.bound_op import BoundOp

from .equation_templates import EquationTemplate, TemplateWriter, TracedAtom
from .list_calls import Element, call_of, elements_of


class _Lists(NamedTuple):
    """What was traced.

    Attributes:
        shared: what is computed from no element; its results are the first inputs of `elements`.
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
        self._traced_calls: dict[Any, _Lists | None] = {}

    def write(
        self, recipe: int, call: Any, inputs: Sequence[TracedAtom]
    ) -> list[TracedAtom] | None:
        """Write a call.

        Returns:
            Its results; None, and nothing is written, of a call that is not on lists, or of whose
            elements one is computed of another.
        """
        elements = elements_of(call)
        if not elements:
            return None
        operands = [[inputs[read] for read in element.reads] for element in elements]
        kinds = [
            (element.kind, tuple([operand.aval for operand in its]))
            for element, its in zip(elements, operands, strict=True)
        ]
        first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
        inside = {read for element in elements for read in element.reads}
        rest = [index for index in range(len(inputs)) if index not in inside]
        key = recipe, tuple(first), tuple([inputs[index].aval for index in rest])
        if key not in self._traced_calls:
            self._traced_calls[key] = self._traced(call, elements, first, rest, inputs)
        traced = self._traced_calls[key]
        if traced is None:
            return None
        shared = self._writer.write(traced.shared, [inputs[index] for index in rest])
        return [
            self._writer.write(traced.elements[kind], [*shared, *its])[0]
            for kind, its in zip(kinds, operands, strict=True)
        ]

    def _traced(
        self,
        call: BoundOp,
        elements: Sequence[Element],
        first: Mapping[Any, int],
        rest: Sequence[int],
        inputs: Sequence[TracedAtom],
    ) -> _Lists | None:
        some, reads = call_of(call, [*first.values()])
        tensors = len(some.ins)

        def isoshard_lists(*arguments: Any) -> list[Any]:
            return some(arguments[:tensors], arguments[tensors:])

        template = self._writer.traced(isoshard_lists, [inputs[read] for read in reads])
        variables = dict(zip(reads, template.inputs, strict=True))
        operands = {
            kind: [variables[read] for read in elements[index].reads]
            for kind, index in first.items()
        }
        return self._split_template(template, [variables[index] for index in rest], operands)

    def _split_template(
        self, template: EquationTemplate, rest: Sequence[Any], operands: Mapping[Any, Sequence[Any]]
    ) -> _Lists | None:
        """A template as what is shared and what belongs to each element, if they can be separated.

        Args:
            template: with one result for each element, in order.
            rest: variables other than those of elements.
            operands: those of each element.
        """
        owner = {var: kind for kind, its in operands.items() for var in its}
        alone: list[Any] = []
        inside: dict[Any, list[Any]] = {kind: [] for kind in operands}
        for equation in template.equations:
            owners = {
                owner[variable] for variable in _variables(equation.invars) if variable in owner
            }
            if len(owners) > 1 or equation.effects:
                return None
            for kind in owners:
                owner.update(dict.fromkeys(equation.outvars, kind))
            (inside[owners.pop()] if owners else alone).append(equation)
        results = dict(zip(operands, template.results, strict=True))
        read = {
            variable
            for its in inside.values()
            for each in its
            for variable in _variables(each.invars)
        }
        for kind, result in results.items():
            variables = _variables([result.atom])
            if any(owner.get(var, kind) != kind for var in variables):
                return None
            read.update(variables)
        available = [*rest, *[var for equation in alone for var in equation.outvars]]
        shared = [self._writer.typed(var) for var in available if var in read]
        passed = [atom.atom for atom in shared]
        return _Lists(
            EquationTemplate(rest, alone, shared),
            {
                kind: EquationTemplate([*passed, *its], inside[kind], [results[kind]])
                for kind, its in operands.items()
            },
        )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
