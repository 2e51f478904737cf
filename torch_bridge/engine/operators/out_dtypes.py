"""Which dtypes torch's kernels write to `out=`.

Some write their own dtype alone, some cast where numbers can be cast, a few take any.

>>> total = torch.empty(3, dtype=torch.int64, device="jax")
>>> torch.add(torch.ones(3, device="jax"), 1, out=total)
Traceback (most recent call last):
    ...
RuntimeError: aten.add.out: result type Float can't be cast to the desired output type Long
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.signatures.kernel_checks import spelled
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.symbolic_numbers import present

from .call_template import CallTemplate


def refuse(func: OpOverload, args: Any, kwargs: Any, results: list[Any], outs: list[Any]) -> None:
    """Refuse `out=` of a dtype that torch's kernel does not write to.

    Args:
        func: the variant with `out=`.
        args: of the call.
        kwargs: of the call, with those for `out=`.
        results: what the functional operator gave; some dtype is not that of its `out=`.
        outs: where they would go.

    Raises:
        RuntimeError: the kernel writes its own dtype alone, or cannot cast.
        TypeError: likewise, from operators that join tensors.
    """
    if func.name() in _ANY_OUT:
        return
    if func.name() in ("aten::complex.out", "aten::polar.out"):
        raise RuntimeError(
            f"Expected object of scalar type {spelled(results[0].dtype)} but got scalar type "
            f"{spelled(outs[0].dtype)} for argument 'out'"
        )
    if func.name() == "aten::nonzero.out":
        raise RuntimeError(
            f"nonzero: Expected out tensor to have scalar type {spelled(results[0].dtype)} but got "
            f"scalar type {spelled(outs[0].dtype)}"
        )
    if schema_of(func).name in ("aten::any", "aten::all") and outs[0].dtype != torch.uint8:
        name = schema_of(func).name.removeprefix("aten::")
        raise RuntimeError(
            f"{name} only supports bool tensor for result, got: {spelled(outs[0].dtype)}"
        )
    if func.name() in _SAME_OUT:
        raise RuntimeError(
            f"{func}: Found dtype {outs[0].dtype} but expected {results[0].dtype}: expected "
            f"scalar_type {spelled(results[0].dtype)} but found {spelled(outs[0].dtype)}"
        )
    for target, result in zip(outs, results, strict=True):
        if not torch.can_cast(result.dtype, target.dtype):
            joins = func.name() in ("aten::cat.out", "aten::stack.out")
            raise (TypeError if joins else RuntimeError)(
                f"{func}: result type {spelled(result.dtype)} can't be cast to the desired output "
                f"type {spelled(target.dtype)}"
            )
    places = len(results) > 1 and any(result.dtype == torch.int64 for result in results)
    if not places:
        flattener = CallTemplate(func)
        _, tensors, scalars = flattener(args, kwargs)
        positional, named, _ = flattener.template(args, kwargs)
        metas = tuple(tensor._aval.meta for tensor in tensors)
        try:
            infer(func, positional, named, metas, [present(scalar) for scalar in scalars])
            return
        except NotImplementedError:  # without shape function; the result decides
            pass
    for target, result in zip(outs, results, strict=True):
        if result.dtype != target.dtype and (places or result.dtype == torch.int64):
            raise RuntimeError(
                f"{func}: Expected out tensor to have dtype {result.dtype}, but got {target.dtype} "
                "instead"
            )


_ANY_OUT = frozenset({"aten::bernoulli.out"})
"""Operators that draw numbers of whatever dtype `out=` has."""

_ISIN = ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
_SAME_OUT = frozenset(
    f"aten::{name}.out"
    for name in (
        *("neg", "sign", "sgn", "ceil", "floor", "trunc", "round", "frac", "bitwise_not"),
        *("conj_physical", "nan_to_num"),
        *("index_select", "take", "masked_select", "multinomial", "logcumsumexp", "aminmax"),
    )
)
_SAME_OUT |= {"aten::bucketize.Tensor_out", "aten::searchsorted.Tensor_out"}
_SAME_OUT |= {f"aten::isin.{kinds}_out" for kinds in _ISIN}
"""Operators that write to `out=` of their own dtype alone."""
