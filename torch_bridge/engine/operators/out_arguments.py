"""Operators with `out=`: the functional overload, whose results are copied to the `out` tensors.

>>> import isoshard.torch_bridge
>>> out = torch.empty(0, device="jax")
>>> torch.add(torch.ones(2, device="jax"), 1, out=out) is out, out.tolist()
(True, [2.0, 2.0])
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.signatures.cpu_validation import kernel_error
from isoshard.torch_bridge.engine.values.metas import map_leaves
from isoshard.torch_bridge.engine.values.value import contiguous_stride

from . import overlaps
from .functionalize import functional_overload


def handler(func: OpOverload, outs: list[str], handle: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that runs the functional overload, and copies its results to `out=` arguments."""
    functional = functional_overload(func)
    ours = {argument.name for argument in schema_of(func).arguments}
    takes_dtype = "dtype" not in ours and any(
        argument.name == "dtype" for argument in schema_of(functional).arguments
    )
    alone = overlaps.rule(functional)
    quiet = schema_of(func).name in _GROW_QUIETLY or func.name() == "aten::normal.float_float_out"
    follows = func.name() in _DTYPE_OF_OUT
    as_shaped = schema_of(func).name in _AS_SHAPED
    keeps_out = schema_of(func).name in _KEEP_OUT

    def handled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out_args = [kwargs[name] for name in outs]
        targets = [leaf for out in out_args for leaf in (out if isinstance(out, list) else [out])]
        rest = {name: value for name, value in kwargs.items() if name not in outs}
        if takes_dtype or (follows and rest.get("dtype") is None):
            rest["dtype"] = targets[0].dtype
        if alone is not None:
            read = [*args, *rest.values()]
            read += [leaf for arg in read if isinstance(arg, list | tuple) for leaf in arg]
            ours_read = [leaf for leaf in read if isinstance(leaf, lazy_tensor.LazyTensor)]
            for target in targets:
                if isinstance(target, lazy_tensor.LazyTensor):
                    overlaps.check_overlap(target, ours_read, alone)
        outputs = handle(functional, args, rest)
        results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if any(target.dtype != other.dtype for target, other in zip(targets, results, strict=True)):
            _check_dtypes(func, args, kwargs, results, targets)
        for target, result in zip(targets, results, strict=True):
            overlaps.check_writable(func, target)
            if keeps_out and not result.numel():
                continue
            if as_shaped and target.numel() == result.numel():
                result = result.reshape(target.shape)
            if target.shape != result.shape:
                if as_shaped and not quiet and target.numel():
                    warnings.warn(
                        f"The number of elements in the out tensor of shape {list(target.shape)} "
                        f"is {target.numel()} which does not match the computed number of elements "
                        f"{result.numel()}. Note that this may occur as a result of rounding "
                        "error. The out tensor will be resized to a tensor of shape "
                        f"({result.numel()},).",
                        stacklevel=2,
                    )
                elif not quiet:
                    warn_of_resizing(target, result)
                _resize(target, result)
            else:
                torch.ops.aten.copy_.default(target, result)
        if not schema_of(func).returns:
            return None
        return out_args[0] if len(out_args) == 1 else tuple(out_args)

    return handled


def _check_dtypes(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[torch.Tensor],
    targets: list[torch.Tensor],
) -> None:
    """Raise the CPU kernel's error if it does not write results to targets of these dtypes.

    An error that it also has for targets of its own dtypes is one of elements, which are zeros.
    """

    def error_for(models: list[torch.Tensor]) -> Exception | None:
        # Of no elements, which kernels resize without a warning.
        metas = [torch.empty(0, dtype=model.dtype, device="meta") for model in models]
        metas = {id(target): meta for target, meta in zip(targets, metas, strict=True)}
        outs = {
            name: map_leaves(lambda leaf: metas.get(id(leaf), leaf), value)
            for name, value in kwargs.items()
        }
        return kernel_error(func, args, outs)

    error = error_for(targets)
    if error is not None and error_for(results) is None:
        raise error


_KEEP_OUT = frozenset({"aten::native_batch_norm", "aten::_native_batch_norm_legit"})
"""Operators that leave an `out=` as it is where they have nothing for it."""


_DTYPE_OF_OUT = frozenset({"aten::cumsum.out", "aten::cumprod.out", "aten::prod.int_out"})
"""Operators that compute in the dtype of `out=`."""

_GROW_QUIETLY = frozenset(
    f"aten::{name}"
    for name in (
        *("linspace", "logspace", "range", "narrow_copy", "full", "eye", "zeros", "ones"),
        *("rand", "randn", "randint", "randperm", "addbmm", "log_sigmoid_forward"),
        *("bernoulli", "multinomial"),
    )
)
"""Operators that write to an `out=` of another size without a warning."""

_AS_SHAPED = frozenset(f"aten::{name}" for name in ("arange", "range", "linspace", "logspace"))
"""Operators that fill an `out=` with as many elements, whatever its shape."""


def warn_of_resizing(target: Any, result: Any) -> None:
    """Say that an `out=` with elements gets another size, as torch does."""
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape "
            f"{list(target.shape)}, which does not match the required output shape "
            f"{list(result.shape)}; resize it to no elements first, with t.resize_(0), to have it "
            "written anew",
            stacklevel=2,
        )


def _resize(target: Any, result: Any) -> None:
    """Give `target` another size; a view grows within the memory that it views, as in torch."""
    size, offset = tuple(result.shape), target.storage_offset()
    extent = math.prod(target._storage.aval.meta.size)
    if target._chain.ops and offset + result.numel() <= extent:
        view = torch.ops.aten.as_strided.default(target, size, contiguous_stride(size), offset)
        torch.ops.aten.copy_.default(view, result)
        lazy_tensor.adopt(target, view)
    else:
        lazy_tensor.adopt(
            target, result if target.dtype == result.dtype else result.to(target.dtype)
        )
