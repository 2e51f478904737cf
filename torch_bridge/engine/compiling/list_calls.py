"""Operators on lists of tensors, by element: what each element of the results is computed from.

An optimizer's `_foreach_` operators take the parameters of all layers at once, and do the same to
each. `elements_of` reports which elements of a call are identical, and `call_of` makes
the same call on some of them.

>>> import torch
>>> from isoshard.torch_bridge import lowerings
>>> from isoshard.torch_bridge.engine.signatures.shape_inference import infer
>>> add = torch.ops.aten._foreach_add.Scalar
>>> small, large = Meta((2,), (1,), torch.float32), Meta((3,), (1,), torch.float32)
>>> given = ([Slot(0), Slot(1), Slot(2)], Lift(0)), {}, (small, large, small)
>>> call = build_call(add, *given, outs=infer(add, *given, [0.5]))
>>> elements = elements_of(call)
>>> [one.kind == elements[0].kind for one in elements], elements[2].reads
([True, False, True], (2,))
>>> some, reads = call_of(call, [0, 1])
>>> reads, [out.size for out in some.outs]               # the float comes after all tensors
([0, 1, 3], [(2,), (3,)])
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from isoshard.torch_bridge.engine.signatures.bound_op import BoundOp, build_call
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot

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
