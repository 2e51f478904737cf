"""How a TPU's or GPU's compiler would schedule the program of the host's partitioner.

The same arrays, in the order of those compilers, in which products read any layout (`hlo_layouts`).
On TPUs some products become loops (`windowed_products`). On GPUs also siblings are fused
(`hlo_kernels`), arrays have two layouts, and stacks are copied for gathers.

XLA's compiler for GPUs schedules under a limit: 95 % of what 80 % of the device's memory leaves
beside arguments and results (`GetSchedulerMemoryLimit` of its gpu_hlo_schedule.cc). A program that
needs more is ordered to save memory, and what is cheap is computed again, until it is within the
limit or nothing helps any more.

Their order is `scheduling.kernel_orders.behind_loops`. And what is small and the last to read what
is large (the gradient of a norm's weight) they compute at once, where the host's compiler may leave
it to the end.

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
from .hlo_kernels import PRODUCTS, dataflow, in_order, siblings_together
from .hlo_layouts import copied_between_loops, meeting
from .hlo_liveness import ProgramLiveness, liveness
from .windowed_products import WindowedProduct, multiplied_by_parts

_USED, _SLOP = 0.8, 0.95
SAVED = (
    "the step needs more than XLA's compiler for GPUs schedules for, so it is taken to save memory "
    "and to compute again what it can"
)
"""Of an estimate that is at that limit."""


def target_liveness(
    module: HloModule,
    platform: str,
    memory: int,
    products: Mapping[str, Sequence[WindowedProduct]] = MappingProxyType({}),
) -> tuple[ProgramLiveness, tuple[str, ...]]:
    """What is alive in a program, as a target's compiler would have it; and notes in words."""
    if platform == "tpu":
        ordered = multiplied_by_parts(in_target_order(module), products)
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
        name: siblings_together(module, computation)
        for name, computation in module.computations.items()
    }
    entry = computations[module.entry.name]
    module = dataclasses.replace(module, computations=computations, entry=entry)
    module = copied_between_loops(with_gathered_copies(module))
    on_gpu = frozenset[str]().union(
        *(meeting(module, computation) for computation in module.computations.values())
    )
    return liveness(module, targets=True, apart=on_gpu)


_SMALL = 8
"""A result that many times smaller than what it reads for the last time is computed at once."""


def in_target_order(module: HloModule, *, saving: bool = False) -> HloModule:
    """The same program in the order of a TPU's or GPU's compiler.

    Args:
        module: whose computations stand in the order in which the host runs them.
        saving: to save memory rather than time: products, too, are computed as soon as they end
            the life of something much larger (gradients of weights, activations).
    """
    computations = {
        name: _early(computation, saving) for name, computation in module.computations.items()
    }
    early = computations[module.entry.name]
    entry = in_order(early, behind_loops(dataflow(module, early)))
    computations[entry.name] = entry
    return dataclasses.replace(module, computations=computations, entry=entry)


def _early(inside: Computation, saving: bool) -> Computation:
    """What is small, and reads what is large for the last time, as soon as that is there."""
    at = {name: index for index, name in enumerate(inside.instructions)}
    early = {name: (index, 0) for name, index in at.items()}
    for one in inside.instructions.values():
        arguments = [early[name] for name in one.operands if name in at]
        early[one.name] = max([(at[one.name], 0), *arguments]) if arguments else (-1, 0)
        products = frozenset[str]() if saving else PRODUCTS
        if one.opcode in FREE | RUNS_OTHERS | products or operation(one) or not arguments:
            continue
        own = _only_for(inside, one) if saving else [one]
        mine = {row.name for row in own}
        read = [name for row in own for name in row.operands if name in at and name not in mine]
        large = sum(
            array.bytes
            for name in dict.fromkeys(read)
            if max(at[user.name] for user in inside.users[name]) <= at[one.name]
            and inside.users[name][-1].name in mine
            for array in _made(inside.instructions[name])
        )
        if _SMALL * sum(array.bytes for array in one.arrays) < large:
            ready = max((early[name] for name in read), default=(-1, 0))
            for index, row in enumerate(reversed(own), 1):
                early[row.name] = (ready[0], ready[1] + index)
    return _sorted(inside, early)


def _only_for(inside: Computation, one: Instruction) -> list[Instruction]:
    """An instruction, and what is made for it alone, the last first."""
    only = [one]
    for row in only:
        for name in row.operands:
            source = inside.instructions.get(name)
            if source is not None and source.opcode in ("bitcast", "copy", "fusion", "transpose"):
                if len(inside.users[name]) == 1:
                    only.append(source)
    return only


def _made(one: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays of a result, unless it is given."""
    return () if one.opcode in ("parameter", "get-tuple-element") else one.arrays


def _sorted(inside: Computation, key: Mapping[str, tuple[int, ...]]) -> Computation:
    rows = sorted(inside.instructions.values(), key=lambda value: key[value.name])
    return Computation(inside.name, {one.name: one for one in rows}, inside.root)


_LARGE = 1 << 20


def with_gathered_copies(module: HloModule) -> HloModule:
    """The same program with those copies."""
    entry = module.entry
    copied: dict[str, str] = {}
    rows = dict[str, Instruction]()
    for one in entry.instructions.values():
        if one.opcode == "while":
            start = entry.instructions[one.operands[0]]
            body = module.computations[one.called[0]]
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
        rows[one.name] = one
    if not copied:
        return module
    changed = Computation(entry.name, rows, rows[entry.root.name])
    computations = dict(module.computations) | {entry.name: changed}
    return dataclasses.replace(module, computations=computations, entry=changed)


def _turned(module: HloModule, body: Computation) -> set[int]:
    """Numbers of the carry's stacks that a body gathers along an inner axis of a slice."""
    turned = set[int]()
    for one in body.instructions.values():
        if not one.opcode.startswith("all-gather") or one.opcode.endswith("-done"):
            continue
        axis = re.search(r"\bdimensions=\{(\d+)\}", one.attributes)
        maker = body.instructions.get(one.operands[0])
        if axis is None or maker is None or maker.opcode != "fusion":
            continue
        inside = module.computations[maker.called[0]]
        slices = [row for row in inside.instructions.values() if row.opcode == "dynamic-slice"]
        turns = [row for row in inside.instructions.values() if row.opcode == "transpose"]
        if len(slices) != 1 or len(turns) > 1:
            continue
        index = int(axis[1])
        if turns:
            index = _numbers(turns[0].attributes)[index]
        parameters = {row.name: index for index, row in enumerate(inside.parameters)}
        stack = parameters.get(slices[0].operands[0])
        source = None if stack is None else body.instructions[maker.operands[stack]]
        if index and source is not None and source.opcode == "get-tuple-element":
            turned.add(int(source.attributes.partition("index=")[2].partition(",")[0]))
    return turned


def _numbers(attributes: str) -> list[int]:
    match = re.search(r"dimensions=\{([\d,]*)\}", attributes)
    return [int(one) for one in match[1].split(",")] if match else []
