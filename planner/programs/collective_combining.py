"""Collective combining of the compilers of TPUs and GPUs.

XLA's combiner passes combine the collectives of one computation with the same operation and the
same groups, in order, until the next one depends on one of them or their size exceeds a threshold.
The bytes sent are the same; there are fewer operations. libtpu combines all-reduces, up to 120 MiB
(its flag `xla_jf_crs_combiner_threshold_in_bytes`); the compiler for GPUs also all-gathers,
reduce-scatters and collective-permutes, up to 30 MiB of results.

Source: collective_combiner_utils.h of XLA.

The compiler for GPUs has fused kernels of several results before, and a kernel runs when the
operands of all its results are ready: one collective may wait for what only another result needs.
It fuses two kernels that read the same array and loop over as many elements, if neither depends on
the other (multi_output_fusion.cc). In a loss over a split vocabulary one kernel picks the labels'
logits and computes the gradient of all logits, which waits for the sum of exponentials. A weight's
update may be fused with its copy for the backward pass.

The pass visits arrays from the end of a program to its start, an argument by its first reader. Of
an array's readers, kernels of several results come first (an optimizer's update), then fusions,
then single operations. Before that, cheap kernels are recomputed in all their readers, if all of
these can: kernels that loop over as many elements, products, and copies in another order. Such a
copy exists for a collective along an inner dimension and for the filter of a convolution, but not
for the reversed filter of its gradient, which cuDNN reads as it is.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: f32[8,4], w: f32[8,4]) -> (f32[8,4], f32[8,4]) {
...   %a = f32[8,4]{1,0} parameter(0)
...   %w = f32[8,4]{1,0} parameter(1)
...   %sum = f32[8,4]{1,0} all-reduce(%a), to_apply=%add
...   %new = f32[8,4]{1,0} fusion(%w, %sum), kind=kLoop, calls=%update
...   %half = bf16[8,4]{1,0} convert(%w)
...   %all = bf16[16,4]{1,0} all-gather(%half), dimensions={0}
...   ROOT %both = (f32[8,4]{1,0}, bf16[16,4]{1,0}) tuple(%new, %all)
... }
... %update (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   %q = f32[8,4]{1,0} parameter(1)
...   %r = f32[8,4]{1,0} multiply(%q, %q)
...   ROOT %s = f32[8,4]{1,0} subtract(%p, %r)
... }''')
>>> waits(module, module.entry, ["sum", "all"])
{'sum': frozenset(), 'all': frozenset({'sum'})}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from isoshard.core.kit import Computation, HloModule, Instruction, groups_of, operation
from isoshard.planner.costs.device_program import DeviceOp

from .hlo_kernels import ELEMENTWISE, is_elementwise
from .hlo_layouts import PRODUCTS, read_in_any_order

_COMBINED_ON_GPUS = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")
_MOST_BYTES = {
    "tpu": {"all-reduce": 120 * 2**20},
    "gpu": dict.fromkeys(_COMBINED_ON_GPUS, 30 * 2**20 + 7),
}
_MOST_ARRAYS = 256


class InstructionOp(NamedTuple):
    """An operation, with the instruction that it comes from.

    Attributes:
        name: of the instruction; "" for an operation of another computation.
        op: the operation.
    """

    name: str
    op: DeviceOp


def joined(
    module: HloModule, inside: Computation, entries: Sequence[InstructionOp], target: str
) -> list[DeviceOp]:
    """The operations of a computation, with small collectives combined.

    Args:
        module: the program.
        inside: the computation.
        entries: its operations, in order.
        target: "tpu" or "gpu".

    Returns:
        The operations; a combined one is where the last of its collectives was, with the line of
        the largest.
    """
    most = _MOST_BYTES.get(target, {})
    indices: dict[Hashable, int] = {}
    kinds = {
        index: indices.setdefault(_kind(module, inside, op), index)
        for index, op in enumerate(entries)
        if op.name and op.op.name in most and _size(inside, op) <= most[op.op.name]
    }
    positions = {entries[index].name: index for index in kinds}
    if target == "gpu":
        before = waits(module, inside, positions)
        kinds = {positions[name]: kinds[positions[name]] for name in before}
    else:
        before = _before(inside, {*positions})
    replaced: dict[int, DeviceOp | None] = {}
    while kinds:
        first = next(iter(kinds))
        several, total = list[int](), 0
        for index in [n for n, kind in kinds.items() if kind == kinds[first]]:
            total += _size(inside, entries[index])
            needs = before[entries[index].name]
            if total > most[entries[first].op.name] or any(
                entries[n].name in needs for n in several
            ):
                break
            several.append(index)
            if len(several) == _MOST_ARRAYS:
                break
        for index in several:
            del kinds[index]
            replaced[index] = None
        replaced[max(several)] = _combined([entries[index].op for index in several])
    ops = [replaced.get(index, op.op) for index, op in enumerate(entries)]
    return [op for op in ops if op is not None]


def _kind(module: HloModule, inside: Computation, sender: InstructionOp) -> Hashable:
    """A key that is equal for collectives that may be combined."""
    row = inside.instructions[sender.name]
    body = module.computations.get(row.called[0]) if row.called else None
    dtype = "" if sender.op.name == "all-gather" else sender.op.dtype
    return sender.op.name, groups_of(row.text), dtype, body.root.opcode if body else ""


def _size(inside: Computation, sender: InstructionOp) -> int:
    """Bytes of its result."""
    if sender.op.name != "reduce-scatter":
        return sender.op.sent
    groups = groups_of(inside.instructions[sender.name].text)
    return sender.op.sent // (len(groups[0]) if groups else 1)


def _before(inside: Computation, names: set[str]) -> dict[str, frozenset[str]]:
    """The named instructions that each instruction depends on."""
    before: dict[str, frozenset[str]] = {}
    for row in inside.instructions.values():
        operands = [name for name in row.operands if name in before]
        needed = (before[name] | ({name} & names) for name in operands)
        before[row.name] = frozenset[str]().union(*needed)
    return before


def _combined(ops: Sequence[DeviceOp]) -> DeviceOp:
    largest = max(ops, key=lambda op: op.sent)
    return dataclasses.replace(
        largest,
        bytes=sum(op.bytes for op in ops),
        sent=sum(op.sent for op in ops),
        live=max(op.live for op in ops),
        waits=any(op.waits for op in ops),
    )


_MOVES = frozenset(("bitcast", "broadcast", "copy", "iota", "reshape", "reverse", "transpose"))
_LOOPS = frozenset(("concatenate", "dynamic-slice", "gather", "pad", "reduce", "slice"))
_WITHIN = frozenset(("constant", "parameter", "partition-id"))
_CONVOLVES = "conv_general_dilated"
"""In the name of a product that the host's compiler made of a convolution with a window of one."""


@dataclasses.dataclass
class _Node:
    """An instruction, or a copy that the host's program does not have.

    Attributes:
        reads: names of other nodes.
        size: how many elements it loops over; 0 if it is not a loop.
        reduced: how many elements a reduction leaves; else 0.
        rank: 2 with several results, 1 of a fusion, 0 of a single operation.
        cheap: whether it may be recomputed.
        takes_in: whether it can recompute its operands, of any size.
    """

    reads: list[str]
    size: int = 0
    reduced: int = 0
    rank: int = 0
    cheap: bool = False
    takes_in: bool = False


def waits(
    module: HloModule, inside: Computation, names: Collection[str]
) -> dict[str, frozenset[str]]:
    """The instructions, of those named, that each of them waits for.

    Args:
        module: the host's program.
        inside: a computation of it, in order.
        names: of the instructions, in order.

    Returns:
        By name, in the same order except for those that wait for a later one.
    """
    graph = _graph(module, inside)
    _recompute(graph)
    _fuse_updates(graph, inside)
    bit = {name: 1 << index for index, name in enumerate(graph)}
    before: dict[str, int] = {}
    for name, node in graph.items():
        before[name] = bit[name]
        for read in node.reads:
            before[name] |= before[read]
    relevant = 0
    for name in names:
        relevant |= before[name]
    fused = set[str]()
    for first, second in _siblings(graph, inside, fused):
        pair, new = bit[first] | bit[second], graph[first]
        if pair & relevant and not (before[first] & bit[second] or before[second] & bit[first]):
            fused.add(second)
            new.rank, new.reduced = 2, new.reduced or graph[second].reduced
            both = before[first] | before[second]
            relevant |= both
            before = {
                name: split | both if split & pair else split for name, split in before.items()
            }
    result = {
        name: frozenset(other for other in names if before[name] & bit[other] and other != name)
        for name in names
    }
    ordered: dict[str, frozenset[str]] = {}
    for name in names:
        needed = [other for other in names if other in result[name]]
        for other in (*sorted(needed, key=lambda node: len(result[node])), name):
            ordered[other] = result[other]
    return ordered


def _siblings(
    graph: dict[str, _Node], inside: Computation, fused: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Pairs of kernels that read the same array and may be fused, in the order of XLA's pass."""
    readers = _readers(graph)
    at = {name: index for index, name in enumerate(graph)}
    for name in readers:
        if inside.instructions.get(name, inside.root).opcode == "parameter":
            at[name] = at[readers[name][0]]
    for source in sorted(readers, key=lambda name: -at[name]):
        row = inside.instructions.get(source)
        if row is None or row.opcode == "constant" or _elements(row) < 2:
            continue
        several = [name for name in readers[source] if graph[name].size]
        several.sort(key=lambda name: -graph[name].rank)
        for index, first in enumerate(several):
            for second in several[index + 1 :]:
                node, other = graph[first], graph[second]
                fits = not node.reduced or not other.reduced or node.reduced == other.reduced
                alive = first not in fused and second not in fused
                if node.rank and fits and node.size == other.size and alive:
                    yield first, second


def _readers(graph: dict[str, _Node]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {}
    for name, node in graph.items():
        for read in dict.fromkeys(node.reads):
            readers.setdefault(read, []).append(name)
    return readers


def _graph(module: HloModule, inside: Computation) -> dict[str, _Node]:
    """The dataflow graph of a computation, with the copies that the compiler for GPUs inserts."""
    rows = inside.instructions
    turned = _reversed_filters(module, inside)
    passed = read_in_any_order(module, inside) | turned
    graph: dict[str, _Node] = {}
    filters: dict[str, str] = {}
    for row in rows.values():
        if row.name in passed or row.opcode == "bitcast":
            continue
        new, copied = _node(module, inside, row), _filter(inside, row)
        for index, name in enumerate(row.operands):
            chain = [name]
            while chain[-1] in passed or rows[chain[-1]].opcode == "bitcast":
                chain.append(rows[chain[-1]].operands[0])
            source, copy = rows[chain[-1]], f"{row.name} {index}"
            if index == copied:
                if source.name not in filters or not turned & set(chain):
                    graph[copy] = _Node([source.name], _elements(source), rank=1, takes_in=True)
                    filters[source.name] = copy
                new.reads.append(filters[source.name])
            elif (
                operation(row)
                and len(inside.users[source.name]) > 1
                and _has(module, source, "copy")
            ):
                graph[copy] = _Node([source.name], _elements(source), rank=1)
                new.reads.append(copy)
            else:
                new.reads.append(source.name)
        graph[row.name] = new
    return graph


def _node(module: HloModule, inside: Computation, row: Instruction) -> _Node:
    """An instruction as a node, without its reads."""
    body = module.computations.get(row.called[0]) if row.opcode == "fusion" else None
    rows = body.instructions if body else inside.instructions
    done = [row for row in rows.values() if row.opcode not in _WITHIN] if body else [row]
    if any(row.opcode not in ELEMENTWISE | _MOVES | _LOOPS for row in done):
        return _Node([], takes_in=row.opcode in PRODUCTS and not _convolves(row))
    sums = [row for row in done if row.opcode == "reduce"]
    size = max([_elements(row), *(_elements(rows[row.operands[0]]) for row in sums)])
    cheap = is_elementwise(module, row)
    return _Node([], size, _elements(row) if sums else 0, int(len(done) > 1), cheap)


def _filter(inside: Computation, row: Instruction) -> int | None:
    """The index of a convolution's filter: the operand smaller than the other and the result."""
    if row.opcode not in PRODUCTS or not _convolves(row):
        return None
    sizes = [_elements(inside.instructions[name]) for name in row.operands]
    return sizes.index(min(sizes)) if min(sizes) < min(max(sizes), _elements(row)) else None


def _convolves(row: Instruction) -> bool:
    return row.opcode == "convolution" or f"/{_CONVOLVES}" in row.attributes


def _reversed_filters(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the reversed copies that only convolutions read."""
    return frozenset(
        row.name
        for row in inside.instructions.values()
        if _has(module, row, "reverse")
        and len(row.operands) == 1
        and inside.users[row.name]
        and all(user.opcode in PRODUCTS for user in inside.users[row.name])
    )


def _has(module: HloModule, row: Instruction, opcode: str) -> bool:
    if row.opcode != "fusion":
        return row.opcode == opcode
    return any(
        row.opcode == opcode for row in module.computations[row.called[0]].instructions.values()
    )


def _elements(row: Instruction) -> int:
    return math.prod(row.arrays[0].sizes) if row.arrays else 0


def _recompute(graph: dict[str, _Node]) -> None:
    """Remove cheap kernels that all their readers recompute."""
    readers = _readers(graph)
    for name, node in list(graph.items()):
        reading = readers.get(name, []) if node.cheap else []
        all_of_them = all(_takes(graph[reader], node) for reader in reading)
        taking = [reader for reader in reading if all_of_them or graph[reader].takes_in]
        if len(taking) < len(reading) and len(node.reads) > 1:
            continue
        for reader_node in (graph[reader] for reader in taking):
            reader_node.reads = [*(read for read in reader_node.reads if read != name), *node.reads]
        removed = [name] if taking and all_of_them else []
        for read in node.reads:
            saved = [reader for reader in readers[read] if reader not in removed]
            readers[read] = list(dict.fromkeys((*saved, *taking)))
        for each in removed:
            del graph[each]


def _takes(reader: _Node, node: _Node) -> bool:
    return reader.takes_in or reader.size == node.size


def _fuse_updates(graph: dict[str, _Node], inside: Computation) -> None:
    """Fuse a kernel with those that it reads, if these are otherwise only results."""
    readers, root = _readers(graph), inside.root.name
    for name, node in list(graph.items()):
        for read in dict.fromkeys(node.reads) if node.size and name != root else ():
            first = graph[read]
            if first.size == node.size and set(readers[read]) == {name, root}:
                node.reads = [*(other for other in node.reads if other != read), *first.reads]
                node.rank = 2
                graph[root].reads = [n for n in graph[root].reads if n != read]
                del graph[read]
