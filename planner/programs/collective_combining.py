"""Collective combining of the compilers of TPUs and GPUs.

XLA's combiner passes take those of one computation that do the same among the same devices, in
order, until the next one needs the result of one of them or they become too large together. What is
sent stays the same; there are fewer operations. libtpu joins all-reduces, by 120 MiB (its flag
`xla_jf_crs_combiner_threshold_in_bytes`); the compiler for GPUs also gathers, reduce-scatters and
permutes, by 30 MiB of results.

The compiler for GPUs has made kernels of several results before, so one collective may wait for
what only another result needs.

Source: collective_combiner_utils.h of XLA.

On a GPU, which collectives another one waits for: a kernel runs when all is there that any of its
results is made from. XLA's compiler for GPUs makes one kernel of two that read the same array and
loop over as many elements, if neither needs the other (multi_output_fusion.cc). So what is sent
next may wait for what only another result needs. In a loss over a split vocabulary one kernel picks
the labels' logits and makes the gradient of all logits, which waits for the sum of exponentials.
With a weight's update its copy for the backward pass may be one.

Arrays are looked at from the end of a program to its start, an argument by its first reader. Of
an array's readers those that have several results come first (an optimizer's update), then fusions,
then single operations. Before that, what is cheap is computed again in all that read it, if all of
them can: kernels that loop over as many elements, products, and copies in another order. Such a
copy is made for a collective along an inner dimension and for the filter of a convolution, but not
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

_ONES_OF_GPUS = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")
_MOST_BYTES = {
    "tpu": {"all-reduce": 120 * 2**20},
    "gpu": dict.fromkeys(_ONES_OF_GPUS, 30 * 2**20 + 7),
}
_MOST_ARRAYS = 256


class SentBy(NamedTuple):
    """What an instruction does.

    Attributes:
        name: of the instruction; "" of one in another computation.
        op: what it does.
    """

    name: str
    op: DeviceOp


def joined(
    module: HloModule, inside: Computation, done: Sequence[SentBy], target: str
) -> list[DeviceOp]:
    """What a computation does, with small collectives as one.

    Args:
        module: the program.
        inside: the computation.
        done: what it does, in order.
        target: "tpu" or "gpu".

    Returns:
        The operations; one that stands for several is where the last of them was, and has the line
        of the largest.
    """
    most = _MOST_BYTES.get(target, {})
    indices: dict[Hashable, int] = {}
    kinds = {
        index: indices.setdefault(_kind(module, inside, op), index)
        for index, op in enumerate(done)
        if op.name and op.op.name in most and _size(inside, op) <= most[op.op.name]
    }
    positions = {done[place].name: place for place in kinds}
    if target == "gpu":
        before = waits(module, inside, positions)
        kinds = {positions[name]: kinds[positions[name]] for name in before}
    else:
        before = _before(inside, {*positions})
    replaced: dict[int, DeviceOp | None] = {}
    while kinds:
        first = next(iter(kinds))
        several, total = list[int](), 0
        for index in [one for one, kind in kinds.items() if kind == kinds[first]]:
            total += _size(inside, done[index])
            needs = before[done[index].name]
            if total > most[done[first].op.name] or any(done[n].name in needs for n in several):
                break
            several.append(index)
            if len(several) == _MOST_ARRAYS:
                break
        for index in several:
            del kinds[index]
            replaced[index] = None
        replaced[max(several)] = _as_one([done[index].op for index in several])
    ops = [replaced.get(index, op.op) for index, op in enumerate(done)]
    return [op for op in ops if op is not None]


def _kind(module: HloModule, inside: Computation, sender: SentBy) -> Hashable:
    """Equal for collectives that may be one."""
    made = inside.instructions[sender.name]
    body = module.computations.get(made.called[0]) if made.called else None
    dtype = "" if sender.op.name == "all-gather" else sender.op.dtype
    return sender.op.name, groups_of(made.text), dtype, body.root.opcode if body else ""


def _size(inside: Computation, sender: SentBy) -> int:
    """Bytes of its result."""
    if sender.op.name != "reduce-scatter":
        return sender.op.sent
    groups = groups_of(inside.instructions[sender.name].text)
    return sender.op.sent // (len(groups[0]) if groups else 1)


def _before(inside: Computation, names: set[str]) -> dict[str, frozenset[str]]:
    """Of each instruction, which of some others it needs."""
    before: dict[str, frozenset[str]] = {}
    for row in inside.instructions.values():
        operands = [name for name in row.operands if name in before]
        needed = (before[name] | ({name} & names) for name in operands)
        before[row.name] = frozenset[str]().union(*needed)
    return before


def _as_one(ops: Sequence[DeviceOp]) -> DeviceOp:
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
        size: how many elements it loops over; 0 of what is no kernel of loops.
        reduced: how many it leaves if it sums up; else 0.
        rank: 2 with several results, 1 of a fusion, 0 of a single operation.
        cheap: whether it may be computed again.
        takes_in: whether it computes what it reads, of any size.
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
    """Which of some instructions each of them waits for.

    Args:
        module: the host's program.
        inside: a computation of it, in order.
        names: of the instructions, in order.

    Returns:
        By name, in the same order but for those that wait for a later one.
    """
    graph = _graph(module, inside)
    _compute_again(graph)
    _update_at_once(graph, inside)
    bit = {name: 1 << index for index, name in enumerate(graph)}
    before: dict[str, int] = {}
    for name, one in graph.items():
        before[name] = bit[name]
        for read in one.reads:
            before[name] |= before[read]
    total = 0
    for name in names:
        total |= before[name]
    gone = set[str]()
    for first, second in _siblings(graph, inside, gone):
        pair, new = bit[first] | bit[second], graph[first]
        if pair & total and not (before[first] & bit[second] or before[second] & bit[first]):
            gone.add(second)
            new.rank, new.reduced = 2, new.reduced or graph[second].reduced
            together = before[first] | before[second]
            total |= together
            before = {
                name: split | together if split & pair else split for name, split in before.items()
            }
    result = {
        name: frozenset(other for other in names if before[name] & bit[other] and other != name)
        for name in names
    }
    ordered: dict[str, frozenset[str]] = {}
    for name in names:
        needed = [other for other in names if other in result[name]]
        for other in (*sorted(needed, key=lambda one: len(result[one])), name):
            ordered[other] = result[other]
    return ordered


def _siblings(
    graph: dict[str, _Node], inside: Computation, gone: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Pairs of kernels that read the same array and may be one, in the order of XLA's pass."""
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
                ours, other = graph[first], graph[second]
                fits = not ours.reduced or not other.reduced or ours.reduced == other.reduced
                there = first not in gone and second not in gone
                if ours.rank and fits and ours.size == other.size and there:
                    yield first, second


def _readers(graph: dict[str, _Node]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {}
    for name, one in graph.items():
        for read in dict.fromkeys(one.reads):
            readers.setdefault(read, []).append(name)
    return readers


def _graph(module: HloModule, inside: Computation) -> dict[str, _Node]:
    """Who reads what, with copies where the compiler for GPUs makes them."""
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
            source, own = rows[chain[-1]], f"{row.name} {index}"
            if index == copied:
                if source.name not in filters or not turned & set(chain):
                    graph[own] = _Node([source.name], _elements(source), rank=1, takes_in=True)
                    filters[source.name] = own
                new.reads.append(filters[source.name])
            elif (
                operation(row)
                and len(inside.users[source.name]) > 1
                and _has(module, source, "copy")
            ):
                graph[own] = _Node([source.name], _elements(source), rank=1)
                new.reads.append(own)
            else:
                new.reads.append(source.name)
        graph[row.name] = new
    return graph


def _node(module: HloModule, inside: Computation, row: Instruction) -> _Node:
    """What a kernel is like; what it reads is not known yet."""
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
    """Which operand of a convolution is its filter: the one that is smaller than all else."""
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


def _compute_again(graph: dict[str, _Node]) -> None:
    """Take out what all its readers compute themselves."""
    readers = _readers(graph)
    for name, one in list(graph.items()):
        mine = readers.get(name, []) if one.cheap else []
        all_of_them = all(_takes(graph[reader], one) for reader in mine)
        taking = [reader for reader in mine if all_of_them or graph[reader].takes_in]
        if len(taking) < len(mine) and len(one.reads) > 1:
            continue
        for row in (graph[reader] for reader in taking):
            row.reads = [*(read for read in row.reads if read != name), *one.reads]
        gone = [name] if taking and all_of_them else []
        for read in one.reads:
            saved = [reader for reader in readers[read] if reader not in gone]
            readers[read] = list(dict.fromkeys((*saved, *taking)))
        for each in gone:
            del graph[each]


def _takes(reader: _Node, one: _Node) -> bool:
    return reader.takes_in or reader.size == one.size


def _update_at_once(graph: dict[str, _Node], inside: Computation) -> None:
    """Make one of a kernel and those that it reads, if only the program's results are them too."""
    readers, root = _readers(graph), inside.root.name
    for name, one in list(graph.items()):
        for read in dict.fromkeys(one.reads) if one.size and name != root else ():
            first = graph[read]
            if first.size == one.size and set(readers[read]) == {name, root}:
                one.reads = [*(other for other in one.reads if other != read), *first.reads]
                one.rank = 2
                graph[root].reads = [n for n in graph[root].reads if n != read]
                del graph[read]
