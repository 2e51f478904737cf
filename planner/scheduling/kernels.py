"""A scheduled program as kernels that read and write values in memory.

Both a jaxpr (`propagation.fusion`) and HLO text (`programs.hlo_liveness`) are translated to this
form, so that each rule about order and memory is implemented once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["loop", "branches", "product", "collective", "other"]


@dataclasses.dataclass(slots=True, eq=False)
class Kernel:
    """One kernel, collective or loop.

    Attributes:
        op: the `LocalOp` or HLO `Instruction` that it runs, the last one of a fusion.
        reads: ids of the values that it reads from memory.
        writes: ids of the values that it writes to memory.
        kind: of the operation, for orders.
        by_element: whether its results are elementwise, in any order.
        in_place: whether a result may overwrite an operand of its size that is last read here.
        renewed: the results that may; None: all.
        is_fusion: whether the compiler generates it, so that it can be rematerialized.
        flops: of all that is fused.
        read: bytes; of what is fused as a slice, those of the slice.
        inside: of a loop or branches, the kernels of each body.
        together: the kernels that run as this one: combined collectives or fused siblings.
    """

    op: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kind: Kind = "other"
    by_element: bool = False
    in_place: bool = False
    renewed: frozenset[int] | None = None
    is_fusion: bool = False
    flops: float = 0.0
    read: int = 0
    inside: tuple[list[Kernel], ...] = ()
    together: tuple[Kernel, ...] = ()

    @property
    def is_loop(self) -> bool:
        """Whether it runs a program several times."""
        return self.kind == "loop"


def together(kernels: Sequence[Kernel], read: int | None = None) -> Kernel:
    """Several kernels as one, which runs as the last of them.

    Args:
        kernels: in their order.
        read: bytes that it reads; None: the sum.
    """
    several = tuple([each for kernel in kernels for each in kernel.together or (kernel,)])
    last = kernels[-1]
    return Kernel(
        last.op,
        tuple(dict.fromkeys([value for each in several for value in each.reads])),
        tuple([value for each in several for value in each.writes]),
        last.kind,
        all(each.by_element for each in several),
        all(each.in_place for each in several),
        None,
        all(each.is_fusion for each in several),
        sum([each.flops for each in several]),
        sum([each.read for each in several]) if read is None else read,
        together=several,
    )


def readers_of(kernels: Iterable[Kernel]) -> dict[int, list[int]]:
    """The positions of the kernels that read each value."""
    readers: dict[int, list[int]] = {}
    for position, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(position)
    return readers


def awaited(
    ops: Sequence[tuple[Sequence[int], Sequence[int], bool]], fresh: Iterable[int]
) -> tuple[list[bool], set[int]]:
    """Which operations of a loop's body depend on values of the same iteration.

    A collective of an input of the loop (the weights of a layer) can start an iteration earlier,
    while that one computes. One of activations, or of gradients of weights, cannot.

    Args:
        ops: of each the values that it reads, those that it writes, and whether its results differ
            in each iteration whatever it reads (products, nested loops).
        fresh: values that each iteration receives from the one before.

    Returns:
        Of each operation whether an operand is computed in the same iteration, and all such values.
    """
    values = set(fresh)
    depends = []
    for reads, writes, computes in ops:
        depends.append(not values.isdisjoint(reads))
        if computes or depends[-1]:
            values.update(writes)
    return depends, values


Inner = Mapping[int, int]
"""By the `id` of a kernel with bodies: bytes that its bodies need."""
