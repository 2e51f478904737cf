"""Which collectives another one waits for, on a GPU: its kernels may have several results.

A kernel runs when all is there that any of its results is made from. XLA's compiler for GPUs makes
one kernel of two that read the same array and loop over as many elements, if neither needs the
other (multi_output_fusion.cc). So what is sent next may wait for what only another result needs. In
a loss over a split vocabulary one kernel picks the labels' logits and makes the gradient of all
logits, which waits for the sum of exponentials. With a weight's update its copy for the backward
pass may be one.

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
from collections.abc import Collection, Iterator

from isoshard.core.runtime.hlo_collectives import operation
from isoshard.core.runtime.hlo_text import Computation, HloModule, Instruction

from .buffer_sharing import ELEMENTWISE, is_elementwise
from .layout_moves import PRODUCTS, read_in_any_order

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
    bit = {name: 1 << number for number, name in enumerate(graph)}
    before: dict[str, int] = {}
    for name, one in graph.items():
        before[name] = bit[name]
        for read in one.reads:
            before[name] |= before[read]
    wanted = 0
    for name in names:
        wanted |= before[name]
    gone = set[str]()
    for first, second in _siblings(graph, inside, gone):
        pair, made = bit[first] | bit[second], graph[first]
        if pair & wanted and not (before[first] & bit[second] or before[second] & bit[first]):
            gone.add(second)
            made.rank, made.reduced = 2, made.reduced or graph[second].reduced
            together = before[first] | before[second]
            wanted |= together
            before = {name: one | together if one & pair else one for name, one in before.items()}
    found = {
        name: frozenset(other for other in names if before[name] & bit[other] and other != name)
        for name in names
    }
    ordered: dict[str, frozenset[str]] = {}
    for name in names:
        needed = [other for other in names if other in found[name]]
        for other in (*sorted(needed, key=lambda one: len(found[one])), name):
            ordered[other] = found[other]
    return ordered


def _siblings(
    graph: dict[str, _Node], inside: Computation, gone: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Pairs of kernels that read the same array and may be one, in the order of XLA's pass."""
    readers = _readers(graph)
    at = {name: number for number, name in enumerate(graph)}
    for name in readers:
        if inside.instructions.get(name, inside.root).opcode == "parameter":
            at[name] = at[readers[name][0]]
    for source in sorted(readers, key=lambda name: -at[name]):
        row = inside.instructions.get(source)
        if row is None or row.opcode == "constant" or _elements(row) < 2:
            continue
        several = [name for name in readers[source] if graph[name].size]
        several.sort(key=lambda name: -graph[name].rank)
        for number, first in enumerate(several):
            for second in several[number + 1 :]:
                ours, other = graph[first], graph[second]
                fits = not ours.reduced or not other.reduced or ours.reduced == other.reduced
                there = first not in gone and second not in gone
                if ours.rank and fits and ours.size == other.size and there:
                    yield first, second


def _readers(graph: dict[str, _Node]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, one in graph.items():
        for read in dict.fromkeys(one.reads):
            found.setdefault(read, []).append(name)
    return found


def _graph(module: HloModule, inside: Computation) -> dict[str, _Node]:
    """Who reads what, with copies where the compiler for GPUs makes them."""
    rows = inside.instructions
    turned = _reversed_filters(module, inside)
    passed = read_in_any_order(module, inside) | turned
    graph: dict[str, _Node] = {}
    filters: dict[str, str] = {}
    for one in rows.values():
        if one.name in passed or one.opcode == "bitcast":
            continue
        made, copied = _node(module, inside, one), _filter(inside, one)
        for number, name in enumerate(one.operands):
            chain = [name]
            while chain[-1] in passed or rows[chain[-1]].opcode == "bitcast":
                chain.append(rows[chain[-1]].operands[0])
            source, own = rows[chain[-1]], f"{one.name} {number}"
            if number == copied:
                if source.name not in filters or not turned & set(chain):
                    graph[own] = _Node([source.name], _elements(source), rank=1, takes_in=True)
                    filters[source.name] = own
                made.reads.append(filters[source.name])
            elif (
                operation(one)
                and len(inside.users[source.name]) > 1
                and _has(module, source, "copy")
            ):
                graph[own] = _Node([source.name], _elements(source), rank=1)
                made.reads.append(own)
            else:
                made.reads.append(source.name)
        graph[one.name] = made
    return graph


def _node(module: HloModule, inside: Computation, one: Instruction) -> _Node:
    """What a kernel is like; what it reads is not known yet."""
    body = module.computations.get(one.called[0]) if one.opcode == "fusion" else None
    rows = body.instructions if body else inside.instructions
    done = [row for row in rows.values() if row.opcode not in _WITHIN] if body else [one]
    if any(row.opcode not in ELEMENTWISE | _MOVES | _LOOPS for row in done):
        return _Node([], takes_in=one.opcode in PRODUCTS and not _convolves(one))
    sums = [row for row in done if row.opcode == "reduce"]
    size = max([_elements(one), *(_elements(rows[row.operands[0]]) for row in sums)])
    cheap = is_elementwise(module, one)
    return _Node([], size, _elements(one) if sums else 0, int(len(done) > 1), cheap)


def _filter(inside: Computation, one: Instruction) -> int | None:
    """Which operand of a convolution is its filter: the one that is smaller than all else."""
    if one.opcode not in PRODUCTS or not _convolves(one):
        return None
    sizes = [_elements(inside.instructions[name]) for name in one.operands]
    return sizes.index(min(sizes)) if min(sizes) < min(max(sizes), _elements(one)) else None


def _convolves(one: Instruction) -> bool:
    return one.opcode == "convolution" or f"/{_CONVOLVES}" in one.attributes


def _reversed_filters(module: HloModule, inside: Computation) -> frozenset[str]:
    """Names of the reversed copies that only convolutions read."""
    return frozenset(
        one.name
        for one in inside.instructions.values()
        if _has(module, one, "reverse")
        and len(one.operands) == 1
        and inside.users[one.name]
        and all(user.opcode in PRODUCTS for user in inside.users[one.name])
    )


def _has(module: HloModule, one: Instruction, opcode: str) -> bool:
    if one.opcode != "fusion":
        return one.opcode == opcode
    return any(
        row.opcode == opcode for row in module.computations[one.called[0]].instructions.values()
    )


def _elements(one: Instruction) -> int:
    return math.prod(one.arrays[0].sizes) if one.arrays else 0


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
            kept = [reader for reader in readers[read] if reader not in gone]
            readers[read] = list(dict.fromkeys((*kept, *taking)))
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
