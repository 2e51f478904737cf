"""Operators on lists of tensors, traced on one element of each kind.

An optimizer's `_foreach_` operators take the parameters of all layers at once, and do the same to
each. `elements_of` reports which elements of a call are identical, and `call_of` makes the same
call on some of them.

>>> import torch
>>> from isoshard.torch_bridge import lowerings
>>> from isoshard.torch_bridge.engine.signatures.shape_inference import infer
>>> add = torch.ops.aten._foreach_add.Scalar
>>> small, large = Meta((2,), (1,), torch.float32), Meta((3,), (1,), torch.float32)
>>> given = ([Slot(0), Slot(1), Slot(2)], Lift(0)), {}, (small, large, small)
>>> call = build_call(add, *given, outs=infer(add, *given, [0.5]))
>>> elements = elements_of(call)
>>> [element.kind == elements[0].kind for element in elements], elements[2].reads
([True, False, True], (2,))
>>> some, reads = call_of(call, [0, 1])
>>> reads, [out.size for out in some.outs]               # the float comes after all tensors
([0, 1, 3], [(2,), (3,)])
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from isoshard.core.runtime._jax_internals.jaxpr_classes import Literal
from isoshard.torch_bridge.engine.signatures.bound_op import BoundOp, build_call
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot

from .equation_templates import EquationTemplate, TemplateWriter, TracedAtom

_ON_LISTS = "aten::_foreach_"


class Element(NamedTuple):
    """One element of a call on lists.

    Attributes:
        kind: equal for elements that differ in values only.
        reads: numbers of the arguments in its place of the lists: tensors first, then lifted
            floats, whose numbers come after those of all tensors.
    """

    kind: Hashable
    reads: tuple[int, ...]


def elements_of(call: Any) -> list[Element]:
    """The elements of a call, one for each result; none of a call that is not on lists."""
    if not isinstance(call, BoundOp) or not call.op.name().startswith(_ON_LISTS):
        return []
    count, floats = len(call.outs), len(call.ins)
    lists = [arg for arg in (*call.args, *call.kwargs.values()) if _is_list(arg)]
    if not lists or call.written or call.random or any(len(list_) != count for list_ in lists):
        return []
    elements = []
    for index, out in enumerate(call.outs):
        leaves = [list_[index] for list_ in lists]
        tensors = tuple([leaf.index for leaf in leaves if isinstance(leaf, Slot)])
        lifts = tuple([floats + leaf.index for leaf in leaves if isinstance(leaf, Lift)])
        metas = tuple([call.ins[tensor] for tensor in tensors])
        shown = tuple(
            [type(leaf) if isinstance(leaf, Slot | Lift) else repr(leaf) for leaf in leaves]
        )
        elements.append(Element((out, metas, shown), tensors + lifts))
    return elements


def call_of(call: BoundOp, elements: Sequence[int]) -> tuple[BoundOp, list[int]]:
    """A call on some elements.

    Returns:
        The call; and what it takes, tensors first, then lifted floats, numbered as in `Element`.
    """
    tensors: dict[int, int] = {}
    lifts: dict[int, int] = {}

    def leaf(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return Slot(tensors.setdefault(arg.index, len(tensors)))
        return Lift(lifts.setdefault(arg.index, len(lifts))) if isinstance(arg, Lift) else arg

    def some(arg: Any) -> Any:
        return [leaf(arg[element]) for element in elements] if _is_list(arg) else leaf(arg)

    args = tuple([some(arg) for arg in call.args])
    kwargs = {name: some(kwarg) for name, kwarg in call.kwargs.items()}
    metas: tuple[Meta, ...] = tuple([call.ins[tensor] for tensor in tensors])
    outs = tuple([call.outs[element] for element in elements])
    reads = [*tensors, *[len(call.ins) + lift for lift in lifts]]
    return build_call(call.op, args, kwargs, metas, outs=outs), reads


def _is_list(arg: Any) -> bool:
    return type(arg) in (list, tuple)


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
