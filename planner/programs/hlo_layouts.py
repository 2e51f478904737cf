"""Memory layouts of a partitioned program, which the target's compiler assigns anew.

Compilers of TPUs and GPUs choose the layout of an array by its readers, and their products read
any layout. The host's compiler makes a transposed copy first.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: bf16[8,16], b: bf16[8,4]) -> bf16[16,4] {
...   %a = bf16[8,16]{1,0} parameter(0)
...   %b = bf16[8,4]{1,0} parameter(1)
...   %t = bf16[16,8]{1,0} transpose(%a), dimensions={1,0}
...   ROOT %dot = bf16[16,4]{1,0} dot(%t, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }''')
>>> sorted(read_in_any_order(module, module.entry))
['t']
>>> axis_after(module, module.entry, module.entry.instructions["t"], 0)
1

XLA's compiler for GPUs does not transpose the result of a product: elementwise results of it have
the product's own layout. Where two such layouts are operands of one instruction (the probabilities
of an attention layer, in the layout of the forward product, and the gradient of the backward one)
the result takes the memory of neither. And an array that one loop returns and another loop reads
in another layout is copied between them.

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
>>> sorted(mixed_orders(module, module.entry))
['sum']
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from isoshard.core.kit import Computation, HloModule, Instruction

from .hlo_kernels import ELEMENTWISE, PRODUCTS, is_elementwise

_MOVES = frozenset(("bitcast", "copy", "reshape", "transpose"))


def read_in_any_order(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the transposed copies that only products read."""
    result: set[str] = set()
    for row in reversed(tuple(inside.instructions.values())):
        users = inside.users[row.name]
        read = all(user.opcode in PRODUCTS or user.name in result for user in users)
        if users and read and row is not inside.root and is_move(module, row):
            result.add(row.name)
    return frozenset(result)


def is_move(module: HloModule, row: Instruction) -> bool:
    """Whether a result is a permutation of an operand's elements."""
    if row.opcode in _MOVES:
        return True
    if row.opcode != "fusion" or len(row.operands) != 1:
        return False
    body = module.computations[row.called[0]]
    return all(inner.opcode in _MOVES | {"parameter"} for inner in body.instructions.values())


def is_reordered(module: HloModule, inside: Computation, row: Instruction) -> bool:
    """Whether it is a move that changes the order of the elements in memory."""
    if not is_move(module, row):
        return False
    if row.opcode == "fusion":
        body = module.computations[row.called[0]]
        return any(is_reordered(module, body, inner) for inner in body.instructions.values())
    source = inside.instructions.get(row.operands[0]) if row.operands else None
    if row.opcode == "copy" and source is not None:
        return _strides(source, True) != _strides(row, True)
    return row.opcode == "transpose"


def axis_after(module: HloModule, inside: Computation, row: Instruction, axis: int) -> int | None:
    """The axis of a move's result that an axis of its operand becomes.

    Args:
        module: its program.
        inside: the computation of the move.
        row: the move; see `is_move`.
        axis: of its operand.

    Returns:
        The axis of the result that has it, or its outer factor; None if it has one element.
    """
    if row.opcode == "copy":
        return axis
    if row.opcode == "transpose":
        match = re.search(r"dimensions=\{([\d,]*)\}", row.attributes)
        return [int(index) for index in match[1].split(",")].index(axis) if match else None
    if row.opcode != "fusion":
        source = inside.instructions[row.operands[0]]
        bitcast = row.opcode == "bitcast"
        top = _strides(source, bitcast)[axis] * source.arrays[0].sizes[axis]
        pairs = zip(_strides(row, bitcast), row.arrays[0].sizes, strict=True)
        match = [at for at, (low, size) in enumerate(pairs) if low < top <= low * size]
        return match[0] if match and source.arrays[0].sizes[axis] > 1 else None
    body = module.computations[row.called[0]]
    at, index = body.parameters[0], axis
    while at is not body.root:
        (at,) = body.users[at.name]
        index = axis_after(module, body, at, index)
        if index is None:
            return None
    return index


def _strides(row: Instruction, in_memory: bool) -> list[int]:
    """The stride of each axis, in elements."""
    sizes = row.arrays[0].sizes
    order = list(reversed(range(len(sizes))))
    layout = re.search(r"\]\{([\d,]+)", row.shape)
    if in_memory and layout:
        order = [int(index) for index in layout[1].split(",")]
    strides = [0] * len(sizes)
    for at, axis in enumerate(order):
        strides[axis] = math.prod(sizes[minor] for minor in order[:at])
    return strides


Order = tuple[tuple[int, ...], ...]
"""The transpositions between a product and an array computed from it; () is its own order."""

_LARGE = 1 << 20
_PASSED = frozenset(("bitcast", "copy", "get-tuple-element", "transpose", "reshape"))


def orders(
    module: HloModule, inside: Computation, arguments: Mapping[str, Order] | None = None
) -> dict[str, Order]:
    """The orders of a computation's arrays, by their names; only those that are not ()."""
    result = dict(arguments or {})
    for row in inside.instructions.values():
        operand_orders = {
            order for order in _operand_orders(module, inside, row, result).values() if order
        }
        if operand_orders and row.name not in result:
            result[row.name] = min(operand_orders)
    return result


def mixed_orders(
    module: HloModule, inside: Computation, arguments: Mapping[str, Order] | None = None
) -> frozenset[str]:
    """Names of large results with operands in different orders."""
    order_of = orders(module, inside, arguments)
    return frozenset(
        row.name
        for row in inside.instructions.values()
        if len(set(_operand_orders(module, inside, row, order_of).values())) > 1
    )


def copied_between_loops(module: HloModule) -> HloModule:
    """The program with copies of what a loop reads in another order than a loop returned it in."""
    entry = module.entry
    rows = dict[str, Instruction]()
    left: dict[str, dict[int, Order]] = {}
    for row in entry.instructions.values():
        if row.opcode == "while":
            arguments = _carry_orders(entry, row, left)
            body = module.computations[row.called[0]]
            left[row.name] = _result_orders(module, body, arguments)
            wrong = _read_otherwise(module, body, arguments)
            if wrong:
                start = entry.instructions[row.operands[0]]
                names = list(start.operands)
                for at in wrong:
                    source = entry.instructions[names[at]]
                    copy = dataclasses.replace(
                        source, name=f"{source.name}.{row.name}", opcode="copy",
                        operands=(source.name,), attributes="",
                    )  # fmt: skip
                    rows[copy.name] = copy
                    names[at] = copy.name
                rows[start.name] = dataclasses.replace(start, operands=tuple(names))
                rows[start.name] = rows.pop(start.name)
        rows[row.name] = row
    changed = Computation(entry.name, rows, rows[entry.root.name])
    computations = dict(module.computations) | {entry.name: changed}
    return dataclasses.replace(module, computations=computations, entry=changed)


def _carry_orders(
    entry: Computation, loop: Instruction, left: Mapping[str, Mapping[int, Order]]
) -> dict[int, Order]:
    """The elements of a loop's carry that another loop returned in an order of its own."""
    start = entry.instructions[loop.operands[0]]
    result: dict[int, Order] = {}
    for at, name in enumerate(start.operands if start.opcode == "tuple" else ()):
        source = entry.instructions[name]
        while source.opcode in ("copy", "bitcast") and source.operands[0] in entry.instructions:
            source = entry.instructions[source.operands[0]]
        if source.opcode == "get-tuple-element" and source.operands[0] in left:
            order = left[source.operands[0]].get(_index(source), ())
            if order:
                result[at] = order
    return result


def _result_orders(
    module: HloModule, body: Computation, arguments: Mapping[int, Order]
) -> dict[int, Order]:
    """The orders of the carry that a loop's body returns."""
    order_of = orders(module, body, _named(body, arguments))
    if body.root.opcode != "tuple":
        return {}
    result: dict[int, Order] = {}
    for at, name in enumerate(body.root.operands):
        if name in order_of and body.instructions[name].arrays[0].bytes >= _LARGE:
            result[at] = order_of[name]
    return result


def _read_otherwise(
    module: HloModule, body: Computation, arguments: Mapping[int, Order]
) -> list[int]:
    """The elements of a carry that a loop's body combines with another order."""
    names = _named(body, arguments)
    mixed = mixed_orders(module, body, names)
    return [
        at
        for at in arguments
        if any(
            user.name in mixed
            for name, index in _elements(body)
            if index == at
            for user in body.users[name]
        )
    ]


def _named(body: Computation, arguments: Mapping[int, Order]) -> dict[str, Order]:
    return {name: arguments[at] for name, at in _elements(body) if at in arguments}


def _elements(body: Computation) -> Iterator[tuple[str, int]]:
    (carry,) = body.parameters
    for user in body.users[carry.name]:
        if user.opcode == "get-tuple-element":
            yield user.name, _index(user)


def _index(row: Instruction) -> int:
    return int(row.attributes.partition("index=")[2].partition(",")[0])


def _operand_orders(
    module: HloModule, inside: Computation, row: Instruction, order_of: Mapping[str, Order]
) -> dict[str, Order]:
    """The orders of the large operands of an elementwise result."""
    if len(row.arrays) != 1 or row.arrays[0].bytes < _LARGE:
        return {}
    body = module.computations[row.called[0]] if row.opcode == "fusion" and row.called else None
    if body is None and row.opcode not in _PASSED | ELEMENTWISE:
        return {}
    if body is not None and not (is_elementwise(module, row) or _slices(body)):
        return {}
    written = _written(row, body)
    result: dict[str, Order] = {}
    for index, name in enumerate(row.operands):
        source = inside.instructions.get(name)
        if source is None or len(source.arrays) != 1:
            continue
        if math.prod(source.arrays[0].sizes) < written:
            continue
        turns = _path(body, body.parameters[index]) if body else _turn(row)
        result[name] = order_of.get(name, ()) + turns
    return result


def _slices(body: Computation) -> bool:
    return any(
        row.opcode in ("dynamic-slice", "dynamic-update-slice")
        for row in body.instructions.values()
    )


def _written(row: Instruction, body: Computation | None) -> int:
    """How many elements are written: of an updated array those of the update."""
    root = body.root if body else row
    while body and root.opcode in ("bitcast", "convert", "copy"):
        root = body.instructions[root.operands[0]]
    if body and root.opcode == "dynamic-update-slice":
        return math.prod(body.instructions[root.operands[1]].arrays[0].sizes)
    return math.prod(row.arrays[0].sizes)


def _path(body: Computation, parameter: Instruction) -> Order:
    """The transpositions between a fusion's parameter and its result."""
    path: list[tuple[int, ...]] = []
    at = parameter
    while at is not body.root and body.users[at.name]:
        at = body.users[at.name][0]
        path += _turn(at)
    return tuple(path)


def _turn(row: Instruction) -> Order:
    """The permutation of a transpose; () if it moves only axes of one element."""
    if row.opcode != "transpose":
        return ()
    match = re.search(r"dimensions=\{([\d,]*)\}", row.attributes)
    axes = [int(axis) for axis in match[1].split(",")] if match and match[1] else []
    wide = [axis for axis, size in zip(axes, row.arrays[0].sizes, strict=True) if size > 1]
    return () if wide == sorted(wide) else (tuple(axes),)
