"""Operators of torch that the `jax` device cannot compute: candidates for a lowering."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge._torch_internals.dispatcher import has_kernel
from isoshard.torch_bridge.engine.operators import decompose, own_kernels
from isoshard.torch_bridge.engine.operators.dispatch import SPECIAL
from isoshard.torch_bridge.lowerings import registry

_OTHER_TENSORS = (
    "sparse",
    "coo",
    "csr",
    "mkldnn",
    "quantized",
    "quantize_per",
    "nested",
    "_test",
    "_foobar",
)
"""In names of operators for tensors that no JAX array can be, and of torch's own tests."""


def missing() -> list[str]:
    """Schema names of aten operators with a CPU kernel, and nothing that computes them here.

    >>> "aten::add.Tensor" in missing()
    False
    """
    torch.empty(0, device="jax")  # fills the tables
    return sorted(op.name() for op in _functional() if not _is_computed(op))


def _functional() -> Iterator[OpOverload]:
    """The aten operators that take tensors, write to none and return no view."""
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or any(word in name for word in _OTHER_TENSORS):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or not any("Tensor" in str(a.type) for a in op._schema.arguments):
            continue
        if not any(a.alias_info for a in (*op._schema.arguments, *op._schema.returns)):
            yield op


def _is_computed(op: OpOverload) -> bool:
    return (
        not has_kernel(op.name(), "CPU")
        or op.name() in SPECIAL
        or registry.find(op) is not None
        or decompose.find(op) is not None
        or own_kernels.find(op) is not None
    )
