"""A partitioned program in the schedule of a TPU's or GPU's compiler.

The arrays are the same, in the order of those compilers, whose products read any layout
(`hlo_layouts`). On TPUs some products become loops (`windowed_products`). On GPUs also siblings
are fused (`hlo_kernels`), arrays have two layouts, and stacks are copied for gathers.

XLA's compiler for GPUs schedules under a limit: 95 % of what 80 % of the device's memory leaves
next to arguments and results (`GetSchedulerMemoryLimit` of its gpu_hlo_schedule.cc). A program that
needs more is ordered to save memory, and cheap values are recomputed, until it is within the limit
or nothing helps any more.

Their order is `scheduling.kernel_orders.behind_loops`. A small instruction that is the last to
read a large array (the gradient of a norm's weight) runs at once, where the host's compiler may
leave it to the end.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step, is_scheduled=true
... %body (c: f32[8]) -> f32[8] {
...   ROOT %c = f32[8]{0} parameter(0)
... }
... ENTRY %main (a: f32[8], b: f32[8]) -> (f32[8], f32[]) {
...   %a = f32[8]{0} parameter(0)
...   %b = f32[8]{0} parameter(1)
...   %dot = f32[] dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}
...   %loop = f32[8]{0} while(%a), condition=%c, body=%body
...   ROOT %all = (f32[8]{0}, f32[]) tuple(%loop, %dot)
... }''')
>>> [name for name in in_target_order(module).entry.instructions]
['a', 'b', 'loop', 'dot', 'all']

NCCL concatenates what devices send, so XLA's compiler for GPUs stores an array with the gathered
axis outermost. A loop over layers slices its weights out of a stack; where that axis
is an inner one of the stack (weights of `[out, in]`, split along `in`), the full stack is copied
into the other layout before the loop, and the copy stays until the last loop that reads it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from isoshard.core.kit import ArrayShape, Computation, HloModule, Instruction, operation
from isoshard.planner.scheduling.kernel_orders import behind_loops

from .hlo_costs import FREE, RUNS_OTHERS
from .hlo_kernels import PRODUCTS, dataflow, in_order, siblings_adjacent
from .hlo_layouts import copied_between_loops, mixed_orders
from .hlo_liveness import ProgramLiveness, liveness
from .windowed_products import WindowedProduct, rewrite_windowed

_USED, _SLOP = 0.8, 0.95
SAVED = (
    "the step needs more than the memory limit of XLA's scheduler for GPUs, which is assumed to "
    "save memory and to recompute what it can"
)
"""Note of an estimate at that limit."""


def target_liveness(
    module: HloModule,
    platform: str,
    memory: int,
    products: Mapping[str, Sequence[WindowedProduct]] = MappingProxyType({}),
) -> tuple[ProgramLiveness, tuple[str, ...]]:
    """The liveness of a program under a target's compiler; and notes."""
    if platform == "tpu":
        ordered = rewrite_windowed(in_target_order(module), products)
        return liveness(ordered, targets=True), ()
    on_gpu = _on_gpu(in_target_order(module))
    limit = int((_USED * memory - on_gpu.arguments - on_gpu.results) * _SLOP)
    if on_gpu.temporary <= limit:
        return on_gpu, ()
    least = _on_gpu(in_target_order(module, saving=True))
    needed = max(least.temporary, min(limit, on_gpu.temporary))
    return dataclasses.replace(least, temporary=needed), (SAVED,)


def _on_gpu(module: HloModule) -> ProgramLiveness:
    computations = {
        name: siblings_adjacent(module, computation)
        for name, computation in module.computations.items()
    }
    entry = computations[module.entry.name]
    module = dataclasses.replace(module, computations=computations, entry=entry)
    module = copied_between_loops(with_gathered_copies(module))
    mixed = frozenset[str]().union(
        *(mixed_orders(module, computation) for computation in module.computations.values())
    )
    return liveness(module, targets=True, unshared=mixed)


_SMALL = 8
"""An instruction runs at once if the arrays whose last reader it is are so many times larger."""


def in_target_order(module: HloModule, *, saving: bool = False) -> HloModule:
    """The program in the order of a TPU's or GPU's compiler.

    Args:
        module: with computations in the order in which the host runs them.
        saving: whether to save memory rather than time: products, too, run as soon as they free
            much larger arrays (gradients of weights, activations).
    """
    computations = {
        name: _early(computation, saving) for name, computation in module.computations.items()
    }
    early = computations[module.entry.name]
    entry = in_order(early, behind_loops(dataflow(module, early)))
    computations[entry.name] = entry
    return dataclasses.replace(module, computations=computations, entry=entry)


def _early(inside: Computation, saving: bool) -> Computation:
    """A computation with small last readers of large arrays as early as possible."""
    at = {name: index for index, name in enumerate(inside.instructions)}
    early = {name: (index, 0) for name, index in at.items()}
    for instruction in inside.instructions.values():
        arguments = [early[name] for name in instruction.operands if name in at]
        early[instruction.name] = (
            max([(at[instruction.name], 0), *arguments]) if arguments else (-1, 0)
        )
        products = frozenset[str]() if saving else PRODUCTS
        if (
            instruction.opcode in FREE | RUNS_OTHERS | products
            or operation(instruction)
            or not arguments
        ):
            continue
        group = _only_for(inside, instruction) if saving else [instruction]
        names = {row.name for row in group}
        read = [name for row in group for name in row.operands if name in at and name not in names]
        large = sum(
            array.bytes
            for name in dict.fromkeys(read)
            if max(at[user.name] for user in inside.users[name]) <= at[instruction.name]
            and inside.users[name][-1].name in names
            for array in _new_arrays(inside.instructions[name])
        )
        if _SMALL * sum(array.bytes for array in instruction.arrays) < large:
            ready = max((early[name] for name in read), default=(-1, 0))
            for index, row in enumerate(reversed(group), 1):
                early[row.name] = (ready[0], ready[1] + index)
    return _sorted(inside, early)


def _only_for(inside: Computation, instruction: Instruction) -> list[Instruction]:
    """An instruction, and the moves and fusions that only it reads, the last first."""
    only = [instruction]
    for row in only:
        for name in row.operands:
            source = inside.instructions.get(name)
            if source is not None and source.opcode in ("bitcast", "copy", "fusion", "transpose"):
                if len(inside.users[name]) == 1:
                    only.append(source)
    return only


def _new_arrays(row: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays that an instruction computes; () for parameters and their elements."""
    return () if row.opcode in ("parameter", "get-tuple-element") else row.arrays


def _sorted(inside: Computation, key: Mapping[str, tuple[int, ...]]) -> Computation:
    rows = sorted(inside.instructions.values(), key=lambda row: key[row.name])
    return Computation(inside.name, {row.name: row for row in rows}, inside.root)


_LARGE = 1 << 20


def with_gathered_copies(module: HloModule) -> HloModule:
    """The program with the copies of stacks that gathers in loops need."""
    entry = module.entry
    copied: dict[str, str] = {}
    rows = dict[str, Instruction]()
    for instruction in entry.instructions.values():
        if instruction.opcode == "while":
            start = entry.instructions[instruction.operands[0]]
            body = module.computations[instruction.called[0]]
            indices = _turned(module, body) if start.opcode == "tuple" else set[int]()
            for name in [start.operands[at] for at in sorted(indices)]:
                source = entry.instructions[name]
                if name not in copied and source.arrays[0].bytes >= _LARGE:
                    copied[name] = f"{name}.gathered"
                    rows[copied[name]] = dataclasses.replace(
                        source,
                        name=copied[name],
                        opcode="custom-call",
                        operands=(name,),
                        attributes="",
                    )
            if copied and start.opcode == "tuple":
                operands = tuple(copied.get(name, name) for name in start.operands)
                rows.pop(start.name)
                rows[start.name] = dataclasses.replace(start, operands=operands)
        rows[instruction.name] = instruction
    if not copied:
        return module
    changed = Computation(entry.name, rows, rows[entry.root.name])
    computations = dict(module.computations) | {entry.name: changed}
    return dataclasses.replace(module, computations=computations, entry=changed)


def _turned(module: HloModule, body: Computation) -> set[int]:
    """Indices in the carry of the stacks that a body gathers along an inner axis of a slice."""
    turned = set[int]()
    for gather in body.instructions.values():
        if not gather.opcode.startswith("all-gather") or gather.opcode.endswith("-done"):
            continue
        axis = re.search(r"\bdimensions=\{(\d+)\}", gather.attributes)
        maker = body.instructions.get(gather.operands[0])
        if axis is None or maker is None or maker.opcode != "fusion":
            continue
        inside = module.computations[maker.called[0]]
        slices = [row for row in inside.instructions.values() if row.opcode == "dynamic-slice"]
        turns = [row for row in inside.instructions.values() if row.opcode == "transpose"]
        if len(slices) != 1 or len(turns) > 1:
            continue
        index = int(axis[1])
        if turns:
            index = _permutation(turns[0].attributes)[index]
        parameters = {row.name: index for index, row in enumerate(inside.parameters)}
        stack = parameters.get(slices[0].operands[0])
        source = None if stack is None else body.instructions[maker.operands[stack]]
        if index and source is not None and source.opcode == "get-tuple-element":
            turned.add(int(source.attributes.partition("index=")[2].partition(",")[0]))
    return turned


def _permutation(attributes: str) -> list[int]:
    match = re.search(r"dimensions=\{([\d,]*)\}", attributes)
    return [int(axis) for axis in match[1].split(",")] if match else []
