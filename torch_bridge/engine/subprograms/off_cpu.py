"""Operators that XLA has for CPUs, and not for the platform of the devices: the host computes them.

Which these are is what `make aot` finds (docs/aot.md). The tape is executed, torch's CPU kernel
runs, and the result goes back; counted as `fallbacks`, as for operators whose shapes depend on
values. Inside a captured step, and while JAX traces, there is no value yet: there the operator is
rejected by name.

>>> runs_on_host("aten::linalg_eig", "tpu", torch.float32)
True
>>> runs_on_host("aten::linalg_eig", "cpu", torch.float32)
False
>>> runs_on_host("aten::_fft_c2c", "tpu", torch.complex64)
False
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.engine.operators import cpu_fallback, dispatch
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder

from . import subtrace

_WIDE = frozenset((torch.float64, torch.complex128))
_ANY = frozenset((torch.float32, torch.complex64)) | _WIDE

_NOT_ON: dict[str, dict[str, Collection[torch.dtype]]] = {
    "linalg_eig": {"tpu": _ANY},
    "linalg_eigvals": {"tpu": _ANY},
    "_linalg_eigvals": {"tpu": _ANY},
    "_fft_c2c": {"tpu": _WIDE},
    "_fft_r2c": {"tpu": _WIDE},
    "_fft_c2r": {"tpu": _WIDE},
}
"""Operator -> platform -> the dtypes of its first operand for which there is no program."""


def platform() -> str:
    """JAX's platform: "cpu", "tpu", "gpu"."""
    return jax.default_backend()


def runs_on_host(name: str, platform: str, dtype: torch.dtype) -> bool:
    """Whether an operator has no program on a platform."""
    operator = name.removeprefix("aten::").partition(".")[0]
    return dtype in _NOT_ON.get(operator, {}).get(platform, ())


def _by_platform(func: OpOverload) -> dispatch.Handler:
    usual = dispatch.functional_handler(func)
    on_host = cpu_fallback.on_host(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = platform()
        if where == "cpu" or not runs_on_host(func.name(), where, args[0].dtype):
            return usual(args, kwargs)
        _demand_values(func.name(), args[0], where)
        return on_host(args, kwargs)

    return handler


def _demand_values(name: str, tensor: Any, where: str) -> None:
    """Reject an operator of the host where nothing is computed yet."""
    captured = recorder().capture is not None
    lazy = isinstance(tensor, lazy_tensor.LazyTensor)
    traced = subtrace.is_recording() or (
        lazy and isinstance(lazy_tensor.read(tensor).array, Tracer)
    )
    if captured or traced:
        inside = "a captured step" if captured else "a traced function"
        error = CaptureError if captured else NotImplementedError
        raise error(
            f"XLA has no {name} of {tensor.dtype} for {where}: the host computes it, and cannot "
            f"inside {inside}. Compute it before or after, as it is or by .cpu()"
            + (", or in a narrower dtype" if tensor.dtype in _WIDE else "")
        )


def register() -> None:
    """Put these operators into the dispatcher."""
    for name in _NOT_ON:
        func = getattr(torch.ops.aten, name).default
        dispatch.SPECIAL[func.name()] = _by_platform(func)


with optional():
    register()
