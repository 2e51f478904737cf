"""In which order arrays lie in memory on GPUs, where two orders meet, and what that costs.

XLA's compiler for GPUs does not transpose the result of a product: it lays out what is made of it
element by element in the product's own order. Where two such orders meet (the probabilities of an
attention layer, kept in the order of the forward product, and the gradient of the backward one)
the result takes the memory of neither. And an array that one loop leaves and another loop reads in
another order is copied as a whole between them.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
...   %a = f32[1024,1024]{1,0} parameter(0)
...   %x = f32[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
...   %y = f32[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={0}
...   %t = f32[1024,1024]{1,0} transpose(%x), dimensions={1,0}
...   ROOT %sum = f32[1024,1024]{1,0} add(%t, %y)
... }''')
>>> sorted(meeting(module, module.entry))
['sum']
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

from .buffer_sharing import ELEMENTWISE, is_elementwise

Order = tuple[tuple[int, ...], ...]
"""The transpositions that stand between a product and what is made of it; () is its own order."""

_LARGE = 1 << 20
_PASSED = frozenset(("bitcast", "copy", "get-tuple-element", "transpose", "reshape"))


def orders(
    module: HloModule, inside: Computation, given: Mapping[str, Order] | None = None
) -> dict[str, Order]:
    """The orders of a computation's arrays, by their names; only those that are not ().

    Args:
        module: its program.
        inside: the computation.
        given: orders of what it is given.
    """
    found = dict(given or {})
    for one in inside.instructions.values():
        seen = {order for order in _seen(module, inside, one, found).values() if order}
        if seen and one.name not in found:
            found[one.name] = min(seen)
    return found


def meeting(
    module: HloModule, inside: Computation, given: Mapping[str, Order] | None = None
) -> frozenset[str]:
    """Names of large results that are made of arrays in different orders.

    Args:
        module: its program.
        inside: the computation.
        given: orders of what it is given.
    """
    known = orders(module, inside, given)
    return frozenset(
        one.name
        for one in inside.instructions.values()
        if len(set(_seen(module, inside, one, known).values())) > 1
    )


def copied_between_loops(module: HloModule) -> HloModule:
    """The same program with copies of what a loop reads in another order than one left it in.

    Args:
        module: it, in the order in which it runs.
    """
    entry = module.entry
    rows = dict[str, Instruction]()
    left: dict[str, dict[int, Order]] = {}
    for one in entry.instructions.values():
        if one.opcode == "while":
            given = _given(entry, one, left)
            body = module.computations[one.called[0]]
            left[one.name] = _kept(module, body, given)
            wrong = _read_otherwise(module, body, given)
            if wrong:
                start = entry.instructions[one.operands[0]]
                names = list(start.operands)
                for at in wrong:
                    source = entry.instructions[names[at]]
                    copy = dataclasses.replace(
                        source, name=f"{source.name}.{one.name}", opcode="copy",
                        operands=(source.name,), attributes="",
                    )  # fmt: skip
                    rows[copy.name] = copy
                    names[at] = copy.name
                rows[start.name] = dataclasses.replace(start, operands=tuple(names))
                rows[start.name] = rows.pop(start.name)
        rows[one.name] = one
    changed = Computation(entry.name, rows, rows[entry.root.name])
    computations = dict(module.computations) | {entry.name: changed}
    return dataclasses.replace(module, computations=computations, entry=changed)


def _given(
    entry: Computation, loop: Instruction, left: Mapping[str, Mapping[int, Order]]
) -> dict[int, Order]:
    """Of a loop's carry, what another loop left in an order of its own."""
    start = entry.instructions[loop.operands[0]]
    found: dict[int, Order] = {}
    for at, name in enumerate(start.operands if start.opcode == "tuple" else ()):
        source = entry.instructions[name]
        while source.opcode in ("copy", "bitcast") and source.operands[0] in entry.instructions:
            source = entry.instructions[source.operands[0]]
        if source.opcode == "get-tuple-element" and source.operands[0] in left:
            order = left[source.operands[0]].get(_index(source), ())
            if order:
                found[at] = order
    return found


def _kept(module: HloModule, body: Computation, given: Mapping[int, Order]) -> dict[int, Order]:
    """The orders in which a loop's body leaves its carry."""
    known = orders(module, body, _named(body, given))
    if body.root.opcode != "tuple":
        return {}
    found: dict[int, Order] = {}
    for at, name in enumerate(body.root.operands):
        if name in known and body.instructions[name].arrays[0].bytes >= _LARGE:
            found[at] = known[name]
    return found


def _read_otherwise(module: HloModule, body: Computation, given: Mapping[int, Order]) -> list[int]:
    """Which elements of a carry meet another order in a loop's body."""
    names = _named(body, given)
    met = meeting(module, body, names)
    return [
        at
        for at in given
        if any(
            user.name in met
            for name, number in _elements(body)
            if number == at
            for user in body.users[name]
        )
    ]


def _named(body: Computation, given: Mapping[int, Order]) -> dict[str, Order]:
    return {name: given[at] for name, at in _elements(body) if at in given}


def _elements(body: Computation) -> Iterator[tuple[str, int]]:
    (carry,) = body.parameters
    for one in body.users[carry.name]:
        if one.opcode == "get-tuple-element":
            yield one.name, _index(one)


def _index(one: Instruction) -> int:
    return int(one.attributes.partition("index=")[2].partition(",")[0])


def _seen(
    module: HloModule, inside: Computation, one: Instruction, known: Mapping[str, Order]
) -> dict[str, Order]:
    """The orders of the large operands that a result is made of element by element."""
    if len(one.arrays) != 1 or one.arrays[0].bytes < _LARGE:
        return {}
    body = module.computations[one.called[0]] if one.opcode == "fusion" and one.called else None
    if body is None and one.opcode not in _PASSED | ELEMENTWISE:
        return {}
    if body is not None and not (is_elementwise(module, one) or _slices(body)):
        return {}
    written = _written(one, body)
    found: dict[str, Order] = {}
    for number, name in enumerate(one.operands):
        source = inside.instructions.get(name)
        if source is None or len(source.arrays) != 1:
            continue
        if math.prod(source.arrays[0].sizes) < written:
            continue
        own = _path(body, body.parameters[number]) if body else _turn(one)
        found[name] = known.get(name, ()) + own
    return found


def _slices(body: Computation) -> bool:
    return any(
        one.opcode in ("dynamic-slice", "dynamic-update-slice")
        for one in body.instructions.values()
    )


def _written(one: Instruction, body: Computation | None) -> int:
    """How many elements are made: of an updated array those of the update."""
    root = body.root if body else one
    while body and root.opcode in ("bitcast", "convert", "copy"):
        root = body.instructions[root.operands[0]]
    if body and root.opcode == "dynamic-update-slice":
        return math.prod(body.instructions[root.operands[1]].arrays[0].sizes)
    return math.prod(one.arrays[0].sizes)


def _path(body: Computation, parameter: Instruction) -> Order:
    """The transpositions between a fusion's parameter and its result."""
    found: list[tuple[int, ...]] = []
    at = parameter
    while at is not body.root and body.users[at.name]:
        at = body.users[at.name][0]
        found += _turn(at)
    return tuple(found)


def _turn(one: Instruction) -> Order:
    """The transposition that an instruction is, of axes that have more than one element."""
    if one.opcode != "transpose":
        return ()
    text = re.search(r"dimensions=\{([\d,]*)\}", one.attributes)
    axes = [int(axis) for axis in text[1].split(",")] if text and text[1] else []
    wide = [axis for axis, size in zip(axes, one.arrays[0].sizes, strict=True) if size > 1]
    return () if wide == sorted(wide) else (tuple(axes),)
