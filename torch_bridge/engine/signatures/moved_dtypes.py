"""Dtypes that tensors are moved and viewed in, and not computed with: packed floats of four bits.

The device stores their bytes, so an operator that computes would take them for integers.

>>> import torch
>>> x = torch.zeros(4, dtype=torch.uint8, device="jax").view(torch.float4_e2m1fn_x2)
>>> x[1:].view(torch.uint8).tolist()
[0, 0, 0]
>>> x + x
Traceback (most recent call last):
    ...
NotImplementedError: "add.Tensor" is not implemented for torch.float4_e2m1fn_x2: such tensors are moved, joined, indexed, viewed as torch.uint8 and saved. To compute, unpack the bytes of .view(torch.uint8), or convert on the CPU
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence

from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.common.dtypes import BYTES
from isoshard.torch_bridge.engine.values.metas import Meta

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "copy", "_to_copy", "lift_fresh_copy", "alias_copy", "detach_copy", "_unsafe_view",
        "_reshape_copy", "view_copy", "as_strided_copy", "cat", "stack", "flip", "roll", "repeat",
        "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "zeros",
        "zeros_like", "new_zeros", "zero", "index", "index_select", "slice_scatter",
        "select_scatter", "as_strided_scatter", "index_put",
    )
)  # fmt: skip
"""Operators that move elements, whatever they mean."""

_CASTS = frozenset({"aten::_to_copy", "aten::copy"})


def check_moved_only(op: OpOverload, metas: Sequence[Meta | None]) -> None:
    """Refuse to compute with dtypes that are stored as bytes, as CPUs refuse it.

    Args:
        op: the operator.
        metas: of its tensors and results.

    Raises:
        NotImplementedError: it does more than move elements of such a dtype.
    """
    kinds = {meta.dtype for meta in metas if meta is not None}
    packed = kinds & BYTES
    if not packed:
        return
    name = op.name()
    mixed = any(kind.is_floating_point or name in _CASTS for kind in kinds - packed)
    if mixed or name.partition(".")[0] not in _MOVES:
        raise NotImplementedError(
            f'"{name.removeprefix("aten::")}" is not implemented for {next(iter(packed))}: such '
            "tensors are moved, joined, indexed, viewed as torch.uint8 and saved. To compute, "
            "unpack the bytes of .view(torch.uint8), or convert on the CPU"
        )
