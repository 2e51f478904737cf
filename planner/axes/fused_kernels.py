"""Kernels: what one device runs as one, with what it reads and writes in memory."""

from __future__ import annotations

import dataclasses

from isoshard.core.runtime.jaxprs import is_elementwise

from .local_program import LocalOp
from .operand_copies import REORDER

MOVES = frozenset(
    "broadcast_in_dim iota slice pad rev transpose row dynamic_slice concatenate random_bits "
    "split reorder".split()
)
"""What is fused into its readers beside what is computed element by element."""
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax argmin "
    "reduce_window reduce_window_sum reduce_window_max".split()
)


@dataclasses.dataclass(slots=True, eq=False)
class FusedKernel:
    """One operation with all that is fused into it.

    Attributes:
        op: the last one.
        reads: values with memory that it reads.
        writes: values with memory that it makes.
        flops: of all that is fused.
        read: bytes; of what is fused in as a slice, those of the slice.
        inside: of a loop or branches, the kernels of each body.
        together: collectives that are sent as one, or siblings that are made as one, this one among
            them; () if it is alone.
    """

    op: LocalOp
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float
    read: int = 0
    inside: tuple[list[FusedKernel], ...] = ()
    together: tuple[FusedKernel, ...] = ()

    @property
    def by_element(self) -> bool:
        """Whether it makes its results element by element, perhaps in another order."""
        several = self.together or (self,)
        return all(is_elementwise(one.op.name) or one.op.name == REORDER for one in several)

    @property
    def is_fusion(self) -> bool:
        """Whether the compiler writes it by itself: no loop, collective or call of a library."""
        if self.together:
            return all(one.is_fusion for one in self.together)
        name = self.op.name
        known = is_elementwise(name) or name in MOVES or name in REDUCTIONS or name == "gather"
        return known and not self.op.axes and not self.op.bodies

    @property
    def in_place(self) -> bool:
        """Whether it can write where an operand of the same size was."""
        if self.together:
            return all(one.in_place for one in self.together)
        name = self.op.name
        return (
            is_elementwise(name)
            or bool(self.op.bodies)
            or name in ("dynamic_update_slice", "slice", "all-reduce")
        )
