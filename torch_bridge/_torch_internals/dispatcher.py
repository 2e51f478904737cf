"""torch's dispatcher: operators, their schemas, the keys by which a kernel is chosen.

>>> import torch
>>> [argument.name for argument in schema_of(torch.ops.aten.add.Tensor).arguments]
['self', 'other', 'alpha']
>>> has_kernel("aten::add.Tensor", "CPU"), has_kernel("aten::add.Tensor", "Lazy")
(True, False)
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .declared import NAMES, NO_DEVICE

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    OpOverload = NAMES.bind(
        "torch._ops.OpOverload",
        otherwise=Any,
        why="is the type of an operator with its signature",
        without="nothing changes: annotations name it, and no code reads it",
    )
    TorchDispatchMode = NAMES.bind(
        "torch.utils._python_dispatch.TorchDispatchMode",
        why="sees each operation of a region",
        without="`xs.compile` and `xs.Generator` raise",
    )

schema_of: Callable[[Any], Any] = NAMES.field(
    "torch._ops.OpOverload._schema",
    example=lambda: torch.ops.aten.add.Tensor,
    why="names an operator's arguments and what it writes to",
    without=NO_DEVICE,
)

has_kernel: Callable[[str, str], bool] = NAMES.bind(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    why="reports whether an operator has a kernel of its own, or is made of others",
    without=f"{NO_DEVICE}: operators without a lowering raise, `torch.ones` among them",
)

has_fallback: Callable[[Any], bool] = NAMES.bind(
    "torch._C._dispatch_has_backend_fallback",
    otherwise=lambda _key: True,
    why="reports whether another package made autocast pass operators through",
    without="`torch.autocast('jax')` rejects operators that are on none of its lists",
)

DispatchKey: Any = NAMES.bind(
    "torch.DispatchKey", why="names the kinds of kernels that an operator has", without=NO_DEVICE
)

DispatchKeySet: Any = NAMES.bind(
    "torch.DispatchKeySet",
    why="determines which kernel is called, and which kinds a tensor takes part in",
    without=NO_DEVICE,
)

excluding: Callable[[Any], AbstractContextManager[Any]] = NAMES.bind(
    "torch._C._ExcludeDispatchKeyGuard",
    why="calls an operator below autocast",
    without="`torch.autocast('jax')` raises at the first operation",
)

below_autograd: Callable[[], AbstractContextManager[Any]] = NAMES.bind(
    "torch._C._AutoDispatchBelowAutograd",
    why="calls the operator of attention's gradient as torch's own gradient does",
    without="the gradient of attention raises",
)

is_excluded: Callable[[Any], bool] = NAMES.bind(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    why="reports which of torch's transforms see nothing in `__torch_dispatch__`",
    without="operations between `enable_manual_sharding` and `disable_manual_sharding` raise",
)

set_excluded: Callable[[Any, bool], None] = NAMES.bind(
    "torch._C._dispatch_tls_set_dispatch_key_excluded",
    why="lets `vmap` see operations there",
    without="as without its `is_` variant",
)

_TRANSFORM_KEYS = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
    "PythonTLSSnapshot",
)


_forced: Callable[[Any, Any], AbstractContextManager[Any]] = NAMES.bind(
    "torch._C._ForceDispatchKeyGuard",
    why="lets autograd see what a handler in torch does while an operation runs",
    without="handlers in torch of tensors in shards of unequal sizes raise",
)

_included: Callable[[], Any] = NAMES.bind(
    "torch._C._dispatch_tls_local_include_set",
    why="determines what a thread takes part in from its beginning",
    without="as without `_ForceDispatchKeyGuard`",
)

_excluded: Callable[[], Any] = NAMES.bind(
    "torch._C._dispatch_tls_local_exclude_set",
    why="determines what a thread takes no part in from its beginning",
    without="as without `_ForceDispatchKeyGuard`",
)


@functools.cache
def _of_a_new_thread() -> tuple[Any, Any]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: (_included(), _excluded())).result()


def autograd_allowed() -> AbstractContextManager[Any]:
    """Let autograd see the operations of this thread, also where it runs an operation."""
    if not is_excluded(DispatchKey.AutogradOther):
        return nullcontext()
    return _forced(*_of_a_new_thread())


@contextmanager
def transforms_allowed() -> Iterator[None]:
    """Let torch's transforms, as `torch.vmap`, see the operations of this thread."""
    keys = [getattr(DispatchKey, name) for name in _TRANSFORM_KEYS]
    before = [is_excluded(key) for key in keys]
    for key in keys:
        set_excluded(key, False)
    try:
        yield
    finally:
        for key, excluded in zip(keys, before, strict=True):
            set_excluded(key, excluded)


open_functions: Callable[[], int] = NAMES.bind(
    "torch._C._len_torch_function_stack",
    why="counts the function modes that are on, on which a captured step depends",
    without="`xs.compile` raises",
)

open_dispatches: Callable[[], int] = NAMES.bind(
    "torch._C._len_torch_dispatch_stack",
    why="counts the dispatch modes that are on, on which a captured step depends",
    without="as without its variant for functions",
)

decompositions: Any = NAMES.bind(
    "torch._decomp.decomposition_table",
    otherwise={},
    why="has torch's own Python for operators, by which one without a lowering is computed",
    without="such operators raise, as any without a lowering",
)

elementwise_dtypes: Callable[..., Any] = NAMES.bind(
    "torch._prims_common.elementwise_dtypes",
    why="determines in which dtype an operation computes and which it gives",
    without="operations on several dtypes raise, `x + 1` among them",
)

Promotion: Any = NAMES.bind(
    "torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND",
    why="determines by which rule they do",
    without="operations on several dtypes raise, `x + 1` among them",
)
