"""What a TPU's or GPU's compiler would keep of the program that the host's partitioner made.

The same arrays, in the order of those compilers (`target_order`), in which products read any layout
(`layout_moves`). On TPUs some products are taken apart (`windowed_loops`). Of GPUs also fusions of
siblings (`sibling_fusions`), arrays in two orders (`memory_orders`) and copies for gathers
(`gathered_stacks`).

XLA's compiler for GPUs schedules under a limit: 95 % of what 80 % of the device's memory leaves
beside arguments and results (`GetSchedulerMemoryLimit` of its gpu_hlo_schedule.cc). A program that
needs more is ordered to save memory, and what is cheap is computed again, until it is within the
limit or nothing helps any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from isoshard.core.runtime.hlo_text import HloModule

from .gathered_stacks import with_gathered_copies
from .live_values import ProgramLiveness, liveness
from .memory_orders import copied_between_loops, meeting
from .sibling_fusions import siblings_together
from .target_order import in_target_order
from .windowed_loops import multiplied_by_parts
from .windowed_products import WindowedProduct

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
    """What is alive in a program, as a target's compiler would have it; and notes in words.

    Args:
        module: the host's.
        platform: "tpu" or "gpu".
        memory: bytes of a device.
        products: those that are multiplied by parts.
    """
    if platform == "tpu":
        ordered = multiplied_by_parts(in_target_order(module), products)
        return liveness(ordered, targets=True), ()
    found = _on_gpu(in_target_order(module))
    limit = int((_USED * memory - found.arguments - found.results) * _SLOP)
    if found.temporary <= limit:
        return found, ()
    least = _on_gpu(in_target_order(module, saving=True))
    needed = max(least.temporary, min(limit, found.temporary))
    return dataclasses.replace(least, temporary=needed), (SAVED,)


def _on_gpu(module: HloModule) -> ProgramLiveness:
    computations = {
        name: siblings_together(module, one) for name, one in module.computations.items()
    }
    entry = computations[module.entry.name]
    module = dataclasses.replace(module, computations=computations, entry=entry)
    module = copied_between_loops(with_gathered_copies(module))
    apart = frozenset[str]().union(*(meeting(module, one) for one in module.computations.values()))
    return liveness(module, targets=True, apart=apart)
