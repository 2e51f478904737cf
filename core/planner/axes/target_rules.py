"""What compilers of a kind of machine do with a program that the others do not.

Each field is a rule that the compiler follows, with its reason; a depth "trace" of a step reads
them and has no other special cases. `docs/planning.md` says how they were found.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TargetRules:
    """The rules of one kind of machine.

    Attributes:
        scatters: terms of a split result are added up by a reduce-scatter, not by an all-reduce
            and a slice.
        keeps_gathered: what is gathered for one product is kept for the next that needs it; else
            each gathers for itself, as by moving shards while it multiplies.
        widens: dtypes that are computed, and sent, in float32.
        products_fuse: products compute the operands that they read.
        computes_again: what is costly to compute is computed again rather than kept.
        sums_first: sums across devices that are only added are added first, and sent once.
        joins_reductions: all-reduces of which none waits for another are sent as one.
        reduces_in_place: an all-reduce is written over what it sums.
        reorders_operands: operands of products are copied into the order that its kernels want.
        summed_last: products want operands with what is summed at the end of memory; values lie in
            the order in which they are made, and are copied into others.
        computes_again_over: share of a device's memory over which what is computed element by
            element is computed again rather than kept; 0 if never.
        breadth_first: each operation runs as soon as its operands are there, in the order in which
            they are; else an order is looked for in which little is alive.
    """

    scatters: bool
    keeps_gathered: bool
    widens: frozenset[str]
    products_fuse: bool
    computes_again: bool
    sums_first: bool
    joins_reductions: bool
    reduces_in_place: bool
    reorders_operands: bool
    summed_last: bool
    computes_again_over: float
    breadth_first: bool


_TPU = TargetRules(
    scatters=True,
    keeps_gathered=True,
    widens=frozenset(),
    products_fuse=True,
    computes_again=True,
    sums_first=True,
    joins_reductions=False,
    reduces_in_place=True,
    reorders_operands=False,
    summed_last=False,
    computes_again_over=0.0,
    breadth_first=False,
)
RULES = {
    "tpu": _TPU,
    "gpu": dataclasses.replace(
        _TPU,
        products_fuse=False,
        summed_last=True,
        computes_again_over=0.8 * 0.95,  # XLA's share for its scheduler, and its slop factor
    ),
    "cpu": TargetRules(
        scatters=False,
        keeps_gathered=True,
        widens=frozenset({"bfloat16", "float16"}),
        products_fuse=False,
        computes_again=False,
        sums_first=False,
        joins_reductions=True,
        reduces_in_place=False,
        reorders_operands=True,
        summed_last=False,
        computes_again_over=0.0,
        breadth_first=True,
    ),
}
"""By the platform of a chip."""
