"""Handlers of torch functions, and how `__torch_function__` calls them.

>>> import torch, isoshard as iso, isoshard.torch_bridge as xs
>>> def handler(shards, a, b):                   # runs on every device, with its blocks
...     return shards.all_reduce(torch.dot(a, b), shards.axes(a, 0)), ()
>>> a = iso.shard(torch.arange(8.0), iso.make_mesh((4,), ("x",)), ("x",))
>>> with register_function_handler(torch.dot, handler):
...     print(torch.dot(a, a))
tensor(140., device='jax:0', sharding=P())

torch calls `__torch_function__` of a tensor's class before it runs a function. The class of tensors
on the `jax` device disables that; while there is a handler it defines it, which costs every torch
function on this device a few microseconds, and nothing once the last handler is removed. A function
of yours can have a handler if it calls `torch.overrides.handle_torch_function`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.core.extensions import call_function_handler
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.ambient import set_mode
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .unwrap_torch_function import without_override_check

_ENTRIES: dict[Any, list[Entry]] = {}

FRAMEWORKS = ("torch", "jax")


@dataclasses.dataclass
class Entry:
    """A registered handler.

    Attributes:
        function: the torch function.
        handler: see `register_function_handler`.
        framework: "torch" or "jax".
        check: whether results are compared with the function's.
        prove: whether JAX has to prove what a spec declares as replicated.
        calls: cached calls, by shardings, constants and dtypes.
    """

    function: Callable[..., Any]
    handler: Callable[..., Any]
    framework: str
    check: bool
    prove: bool
    calls: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)


class Handle:
    """A registration; as a context manager it lasts as long as the context."""

    def __init__(self, entry: Entry) -> None:
        """See the class."""
        self._entry = entry

    def remove(self) -> None:
        """End it: the handler registered before, if any, is in force again. Idempotent."""
        entries = _ENTRIES.get(self._entry.function, [])
        if self._entry in entries:
            entries.remove(self._entry)
        if not entries:
            _ENTRIES.pop(self._entry.function, None)
        _set_mode()
        if not _ENTRIES and "__torch_function__" in vars(XLAShardedTensor):
            del XLAShardedTensor.__torch_function__

    def __enter__(self) -> Handle:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Remove it."""
        self.remove()


def register_function_handler(
    function: Callable[..., Any],
    handler: Callable[..., Any],
    *,
    framework: str = "torch",
    check: bool = True,
    prove: bool = True,
) -> Handle:
    """Define what a torch function does where its tensors are split over devices.

    Args:
        function: one that `torch.overrides` lists: `torch.dot`, `torch.nn.functional.gelu`,
            `torch.Tensor.matmul` (a method is another function than the one in `torch`); or one of
            yours that checks for overrides with `torch.overrides.handle_torch_function`.
        handler: `handler(shards, *args, **kwargs)`, with this device's block for each tensor. It
            returns `(local, spec)`, or a tuple of local tensors and a tuple of specs; see
            `isoshard.domain.register_function_handler`, which is the same for JAX.
        framework: what the handler is written in: "torch" gets tensors and a `TorchShards`, "jax"
            gets `jax.Array`s and a `Shards`, and may be the same as in JAX.
        check: compare the shapes and dtypes of its results with those that `function` gives on
            `meta` tensors.
        prove: let JAX prove that what a spec calls replicated over a mesh axis is the same on its
            devices.

    Returns:
        A handle. Where no tensor is split, and inside handlers, the function runs as ever; so it
        does on other devices. A later handler for the same function goes first.

    Raises:
        TypeError: `function` or `handler` cannot be called, or torch never checks for overrides of
            `function`.
        ShardingError: `framework` is another.

    Example:
        >>> import isoshard as iso, isoshard.torch_bridge as xs
        >>> def flipped(shards, x, dims):                # of a block; the rows stay
        ...     return torch.flip(x, dims), shards.spec(x)
        >>> x = iso.shard(torch.arange(8.0).reshape(4, 2), iso.make_mesh((4,), ("x",)), ("x", None))
        >>> with xs.register_function_handler(torch.flip, flipped):
        ...     print(torch.flip(x, (1,)).tolist())
        [[1.0, 0.0], [3.0, 2.0], [5.0, 4.0], [7.0, 6.0]]
    """
    for name, argument in (("function", function), ("handler", handler)):
        if not callable(argument):
            raise TypeError(
                f"register_function_handler takes a function and its handler, and the {name} is a "
                f"{type(argument).__name__}; pass a callable"
            )
    if framework not in FRAMEWORKS:
        raise ShardingError(
            f"framework {framework!r} is none of 'torch' and 'jax', in which a handler is written"
        )
    _check_routed(function)
    entry = Entry(function, handler, framework, check, prove)
    _ENTRIES.setdefault(function, []).append(entry)
    _set_mode()
    if "__torch_function__" not in vars(XLAShardedTensor):
        kind: Any = XLAShardedTensor
        kind.__torch_function__ = classmethod(_torch_function)
    return Handle(entry)


def _set_mode() -> None:
    """Make captured steps depend on the handlers in force."""
    set_mode("handlers", tuple([id(entries[-1]) for entries in _ENTRIES.values()]))


_set_mode()


def any_handled(functions: Collection[Any]) -> bool:
    """Whether one of some functions has a handler now.

    Args:
        functions: as `register_function_handler` takes them.
    """
    return any(_ENTRIES.get(function) for function in functions)


def _check_routed(function: Any) -> None:
    name = getattr(function, "__name__", "")
    if function in torch.overrides.get_ignored_functions():
        raise TypeError(
            f"torch never checks for overrides of {name}, so a handler would not be called; "
            "torch.overrides.get_overridable_functions() lists the functions it checks for"
        )
    if name.endswith("_") and not name.endswith("__"):
        raise TypeError(
            f"{name} writes to its argument, and a handler gives new tensors; register one for "
            f"{name.rstrip('_')}"
        )


def _torch_function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    entries = _ENTRIES.get(func)
    if entries and not _decomposing():
        result = call_function_handler(entries[-1], args, kwargs)
        if result is not NotImplemented:
            return result
    return without_override_check(func)(*args, **kwargs)


def _decomposing() -> bool:
    """Whether torch's decomposition of an operator is running, and no code of a caller."""
    return isinstance(tapes.recorder(), tapes.Immediate) and not tapes.takes_constants()
