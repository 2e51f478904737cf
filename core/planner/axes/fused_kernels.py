"""Kernels: what one device runs as one, with what it reads and writes in memory."""

from __future__ import annotations

import dataclasses

from .dimension_rules import is_elementwise
from .local_program import LocalOp


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
        together: collectives that are sent as one, this one among them; () if it is alone.
    """

    op: LocalOp
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float
    read: int = 0
    inside: tuple[list[FusedKernel], ...] = ()
    together: tuple[FusedKernel, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether it can write where an operand of the same size was."""
        name = self.op.name
        return (
            is_elementwise(name)
            or bool(self.op.bodies)
            or name in ("dynamic_update_slice", "slice", "all-reduce")
        )
