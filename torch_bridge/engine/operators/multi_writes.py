"""In-place operators that write to several arguments at once.

`_fused_adamw_` updates parameters and both moments, `_amp_update_scale_` a scale and a counter.
Their lowerings are registered under the in-place name and declare by `writes=` which arguments get
new values; the operator is one entry of the tape, and the new values are written afterwards.

>>> scale, streak = torch.tensor(4.0, device="jax"), torch.tensor(0, device="jax").int()
>>> bad = torch.tensor(1.0, device="jax")
>>> torch._amp_update_scale_(scale, streak, bad, 2.0, 0.5, 2000)
tensor(2., device='jax:0')
>>> scale
tensor(2., device='jax:0')
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.symbolic_numbers import present
from isoshard.torch_bridge.lowerings import registry

from . import dispatch, overlaps
from .call_template import CallTemplate, brought
from .functionalize import written


def updating_handler(func: OpOverload) -> dispatch.Handler:
    """A handler for an in-place overload whose lowering has `writes`.

    Args:
        func: an overload that returns fresh tensors, its first argument, or nothing.
    """
    flattener = CallTemplate(func)
    signatures: dict[Any, dispatch.Signature] = {}
    returns = schema_of(func).returns
    fresh = [index for index, result in enumerate(returns) if result.alias_info is None]

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, tensors, scalars = flattener(args, _with_rate(kwargs))
        signature = signatures.get(key)
        if signature is None:
            signature = signatures[key] = prepare(args, kwargs, tensors, scalars)
        for index in signature.written:
            overlaps.check_writable(func, tensors[index])
        values = dispatch.record(recorder(), signature, tensors, scalars)
        written = values[len(values) - len(signature.written) :]
        for index, value in zip(signature.written, written, strict=True):
            lazy_tensor.write(tensors[index], value)
        if not returns:
            return None
        if not fresh:
            return args[0]
        results = iter(values)
        outputs = [
            None if out is None else lazy_tensor.fresh(out, next(results)) for out in signature.outs
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def prepare(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[lazy_tensor.LazyTensor],
        scalars: list[Any],
    ) -> dispatch.Signature:
        positional, named, _ = flattener.template(args, kwargs)
        metas = tuple(tensor._aval.meta for tensor in tensors)
        outs = infer(func, positional, named, metas, [present(scalar) for scalar in scalars])
        return dispatch.prepare(
            func,
            func,
            flattener,
            args,
            kwargs,
            tensors,
            scalars,
            outs=tuple(outs[index] for index in fresh),
        )

    return handler


def _with_rate(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Let a fused optimizer's learning rate be one number on the CPU in any shape, as on CUDA."""
    rate = kwargs.get("lr")
    if type(rate) is torch.Tensor and rate.device.type == "cpu" and rate.numel() == 1:
        return {**kwargs, "lr": brought(rate).reshape(())}
    return kwargs


def register() -> None:
    """Put the in-place operators whose lowerings write into the dispatcher."""
    for name in registry.names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        func = getattr(
            getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None
        )
        lowering = registry.find(func) if func is not None else None
        if func is None or lowering is None or not lowering.writes:
            continue
        if written(schema_of(func).arguments):
            dispatch.SPECIAL[name] = updating_handler(func)


with optional():
    register()
