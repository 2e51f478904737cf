"""Rules of XLA's compilers for TPUs, GPUs and CPUs, where they differ.

Each field is a rule that the compiler follows, with its reason; depth "trace" reads them and
has no other special cases. `docs/planning.md` has the measurements.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TargetRules:
    """The rules of one kind of machine.

    Attributes:
        scatters: terms of a split result are added up by a reduce-scatter, not by an all-reduce
            and a slice.
        widens: dtypes that are computed, and sent, in float32.
        products_fuse: products compute the operands that they read.
        lookups_fuse: what reads looked up rows looks them up itself, so all tables that it reads
            are alive at once.
        computes_again: what is costly to compute is computed again rather than kept.
        sums_first: sums across devices that are only added are added first, and sent once.
        joins_reductions: all-reduces of which none waits for another are sent as one.
        reduces_in_place: an all-reduce is written over what it sums.
        reorders_operands: operands of products are copied into the order that its kernels read.
        joins_siblings: elementwise results of one size that read the same array are computed by
            one kernel; copies in another order are computed from what their operand reads.
        summed_last: products read operands with summed axes innermost; values are stored in the
            order in which they are computed, and are copied into others (`layout_copies`).
        schedules_for: share of a device's memory that a step may take before what can be
            (`rematerialization`) is computed again rather than kept; 0 if that is never.
        breadth_first: each operation runs as soon as its operands are there, in the order in which
            they are; else products and collectives that loops do not need run behind these, and
            without loops the order is one in which little is alive.
        hides_collectives: without loops, collectives of what is there from the start run as much
            before their readers as they take, overlapping with computation.
    """

    scatters: bool
    widens: frozenset[str]
    products_fuse: bool
    lookups_fuse: bool
    computes_again: bool
    sums_first: bool
    joins_reductions: bool
    reduces_in_place: bool
    reorders_operands: bool
    joins_siblings: bool
    summed_last: bool
    schedules_for: float
    breadth_first: bool
    hides_collectives: bool

    def scheduled_bytes(self, memory: int, always: int) -> int | None:
        """The bytes of a device that the compiler schedules for; None if it has no limit.

        95 % of what is left beside arguments and results (`GetSchedulerMemoryLimit` of XLA's
        gpu_hlo_schedule.cc), and these.
        """
        if not self.schedules_for:
            return None
        return always + max(0, int((self.schedules_for * memory - always) * 0.95))


_TPU = TargetRules(
    scatters=True,
    widens=frozenset(),
    products_fuse=True,
    lookups_fuse=False,
    computes_again=True,
    sums_first=True,
    joins_reductions=False,
    reduces_in_place=True,
    reorders_operands=False,
    joins_siblings=False,
    summed_last=False,
    schedules_for=0.0,
    breadth_first=False,
    hides_collectives=False,
)
RULES = {
    "tpu": _TPU,
    "gpu": dataclasses.replace(
        _TPU,
        products_fuse=False,
        lookups_fuse=True,
        joins_siblings=True,
        summed_last=True,
        schedules_for=0.8,
        hides_collectives=True,
    ),
    "cpu": TargetRules(
        scatters=False,
        widens=frozenset({"bfloat16", "float16"}),
        products_fuse=False,
        lookups_fuse=True,
        computes_again=False,
        sums_first=False,
        joins_reductions=True,
        reduces_in_place=False,
        reorders_operands=True,
        joins_siblings=False,
        summed_last=False,
        schedules_for=0.0,
        breadth_first=True,
        hides_collectives=False,
    ),
}
"""By the platform of a chip."""
