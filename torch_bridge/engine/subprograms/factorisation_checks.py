"""Whether a factorisation succeeded: torch checks after each, and raises where it did not.

`torch.linalg.inv`, `solve`, `cholesky` and others read the outcome at once, as on every torch
device: the operations recorded so far are executed. Call the `_ex` variants (`torch.linalg.inv_ex`)
where that is not wanted. Inside a captured step, and while JAX traces, there is no outcome yet: the
step goes on, and the result of a matrix that cannot be factorised holds NaN or infinities, as
JAX's own functions leave it. Nor is there an answer to what torch asks in gradients of complex
singular and eigenvectors: whether the loss depends on their phases.

>>> import torch
>>> torch.linalg.cholesky(-torch.eye(2, device="jax"))
Traceback (most recent call last):
...
torch._C._LinAlgError: linalg.cholesky: The factorization could not be completed because the input \
is not positive-definite (the leading minor of order 1 is not positive-definite).
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge._torch_internals.tensor_fields import current_node
from isoshard.torch_bridge.engine.operators import cpu_fallback, dispatch, host_ops
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder

from . import subtrace

_CHECK = torch.ops.aten._linalg_check_errors.default
_on_host = cpu_fallback.on_host(_CHECK)
_ALLCLOSE = torch.ops.aten.allclose.default
_compared = host_ops.allclose
_PHASES = frozenset(f"Linalg{name}Backward0" for name in ("Svd", "Eig", "Eigh"))


def _check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _is_later(args[0]):
        _on_host(args, kwargs)


def _allclose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if _is_later(args[0]) and (node := current_node()) is not None and node.name() in _PHASES:
        return True
    return bool(_compared(args, kwargs))


def _is_later(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether a tensor has its value when the code that runs now has ended."""
    if recorder().capture is not None or subtrace.is_recording():
        return True
    return isinstance(lazy_tensor.read(tensor).array, Tracer)


dispatch.SPECIAL |= {_CHECK.name(): _check, _ALLCLOSE.name(): _allclose}
