"""What torch's kernels reject, but its shape functions let pass.

The engine infers the shapes of a result by running the operator on `meta` tensors, and
torch checks most arguments there. Other checks are in the CPU and CUDA kernels only, and are made
here, so that the line at fault raises, with torch's words: by the CPU kernel (`cpu_validation`), or
in `index_checks`, `layer_checks` and `shape_checks`.

>>> check(torch.ops.aten.var.correction, (torch.zeros(2, dtype=torch.int64, device="meta"),), {})
Traceback (most recent call last):
...
RuntimeError: std and var only support floating point and complex dtypes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.common.dtypes import BYTES
from isoshard.torch_bridge.engine.values.metas import Meta

from . import index_checks, layer_checks, shape_checks
from .cpu_validation import plain_name, validate
from .shape_checks import requested_dtype, spelled

Arguments = dict[str, Any]


def check(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject a call on `meta` tensors that torch's kernels reject, with their error."""
    name = plain_name(op)
    checks = _CHECKS.get(name)
    if checks is None:
        if op is torch.ops.aten.ldexp.Tensor:  # torch's kernel warns of a number by several
            args = (args[0].expand(torch.broadcast_shapes(args[0].shape, args[1].shape)), args[1])
        validate(op, args, kwargs)
        return
    arguments = schema_of(op).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    named = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    named = {
        a.name: named.get(a.name, defaults.get(a.name))
        for a in arguments
        if not a.is_out and (a.name in named or a.name in defaults)
    }
    for rule in checks:
        rule(name, named)


def may_widen(
    op: OpOverload, target: torch.dtype, metas: tuple[Any, ...], args: tuple[Any, ...]
) -> bool:
    """Whether an in-place operation may compute a wider kind than what it writes to.

    Args:
        op: what is computed; shape functions of torch before 2.13 divide integers in place.
        target: the dtype it writes to.
        metas: the meta of each tensor argument.
        args: the arguments; one that is neither a number nor a tensor does not count.
    """
    kinds = [_kind(meta.dtype) for meta in metas]
    kinds += [_NUMBERS.get(type(arg).__name__, 0) for arg in args]
    divides = schema_of(op).name in ("aten::div", "aten::_foreach_div")
    return max([*kinds, 2 * divides]) > _kind(target)


def may_grow(targets: tuple[Any, ...], metas: tuple[Any, ...]) -> bool:
    """Whether an in-place operation has an operand of another shape than all it writes to."""
    sizes = {target.size for target in targets}
    return any(meta.size and meta.size not in sizes for meta in metas) or len(sizes) > 1


def check_size(results: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
    """Reject an in-place operation whose result is larger than what it is written to."""
    for result, target in zip(results, targets, strict=False):
        if result is not None and result.size != target.size:
            raise RuntimeError(
                f"output with shape {list(target.size)} doesn't match the broadcast shape "
                f"{list(result.size)}"
            )


def check_cast(results: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
    """Reject an in-place operation whose result cannot be cast to what it is written to."""
    for result, target in zip(results, targets, strict=False):
        if result is not None and not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {spelled(result.dtype)} can't be cast to the desired output type "
                f"{spelled(target.dtype)}"
            )


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


_NUMBERS = {"int": 1, "float": 2, "Lift": 2, "complex": 3}


def _check_integers_drawn(name: str, named: Arguments) -> None:
    """The bounds of random integers, as drawn into a tensor: factories draw without generator."""
    dtype = requested_dtype(named) or (named["self"].dtype if "self" in named else torch.int64)
    target = torch.empty(1, dtype=dtype, device="meta")
    draw = getattr(torch.ops.aten.random_, "from")
    validate(draw, (target, named.get("low", 0), named["high"]), {})


def _check_floats_drawn(name: str, named: Arguments) -> None:
    dtype = requested_dtype(named) or named["self"].dtype
    validate(torch.ops.aten.normal_.default, (torch.empty(1, dtype=dtype, device="meta"),), {})


_CHECKS = {
    **index_checks.CHECKS,
    **layer_checks.CHECKS,
    **shape_checks.CHECKS,
    **dict.fromkeys(("randint", "randint_like"), (_check_integers_drawn,)),
    **dict.fromkeys(("rand_like", "randn_like"), (_check_floats_drawn,)),
}


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
    """Reject computing with packed floats of four bits, as CPUs do: the device stores their bytes.

    Example:
        >>> x = torch.zeros(4, dtype=torch.uint8, device="jax").view(torch.float4_e2m1fn_x2)
        >>> x[1:].view(torch.uint8).tolist()
        [0, 0, 0]
        >>> x + x  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        NotImplementedError: "add.Tensor" is not implemented for torch.float4_e2m1fn_x2: such ...

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
