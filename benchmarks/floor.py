"""The floor of recording: a tensor subclass that does nothing but return a new tensor.

Whoever records torch's operations in `__torch_dispatch__` pays for torch's own C++ (autograd, the
dispatcher), for the call into Python, and for making one wrapper tensor per result. `Floor` pays
for no more than that. What shape each result has is taken from a `Stream`, noted before from the
same step on the `jax` device, so that nothing has to be computed.

>>> import torch, isoshard.torch_bridge
>>> x = torch.zeros(4, device="jax")
>>> Stream.of(lambda: (x[:2] * 2).add_(1)).items[1:]
[('aten::mul.Tensor', ((2,), (1,), torch.float32)), ('aten::add_.Tensor', 0)]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from benchmarks import phases
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.kernels import attention_choice

Result = Any
"""What to return: the position of an argument, (size, stride, dtype), a list of these, or None."""

_LAZY, _JAX = torch.device("lazy", 0), torch.device("jax", 0)
_KINDS = (_optimizer_types, _clipping_types)
_make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]


class Stream:
    """The operations that reach `__torch_dispatch__` of tensors on the `jax` device.

    Attributes:
        items: of each operation its name and what it returned.
    """

    def __init__(self, items: Iterable[tuple[str, Result]] = ()):
        """Begin with these."""
        self.items = list(items)

    @classmethod
    def of(cls, step: Callable[[], Any]) -> Stream:
        """The operations of one call; not those that the engine itself calls on the way."""
        stream = cls()

        def note(func: Any, args: Any, out: Any) -> None:
            stream.items.append((func.name(), _result(out, args)))

        with phases.observed(lazy_tensor.LazyTensor, note):
            step()
        return stream


def _result(out: Any, args: Any) -> Result:
    if isinstance(out, list | tuple):
        return [_result(item, args) for item in out]
    for position, arg in enumerate(args):
        if arg is out:
            return position
    if out is None:
        return None
    return (tuple(out.shape), out.stride(), out.dtype)


class Floor(torch.Tensor):
    """A tensor without values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    _results: Iterator[Result] = iter(())

    @property
    def device(self) -> torch.device:
        """As tensors on the `jax` device say, so that optimizers choose the same operations."""
        return _JAX

    def to(self, *_: Any, **__: Any) -> Floor:
        """It is there already."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the next result of the stream."""
        result = next(Floor._results)
        if type(result) is tuple:
            size, stride, dtype = result
            return _make(cls, size, strides=stride, dtype=dtype, device=_LAZY)
        return _other(result, args)


def place(thing: Any) -> Any:
    """A `Floor` in the place of a tensor, or of every parameter of a module."""
    if isinstance(thing, torch.nn.Module):
        floors: dict[int, Floor] = {}
        for module in thing.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = floors.setdefault(id(parameter), place(parameter))
        return thing
    new = _make(
        Floor,
        tuple(thing.shape),
        strides=thing.stride(),
        dtype=thing.dtype,
        device=_LAZY,
        requires_grad=thing.requires_grad,
    )
    if isinstance(thing, torch.nn.Parameter):
        new._is_param = True
    return new


def _other(result: Result, args: Any) -> Any:
    if type(result) is int:
        return args[result]
    if type(result) is list:
        return [_other(item, args) for item in result]
    if result is None:
        return None
    size, stride, dtype = result
    return _make(Floor, size, strides=stride, dtype=dtype, device=_LAZY)


@contextlib.contextmanager
def replaying(stream: Stream) -> Iterator[None]:
    """Within it, `Floor` tensors follow the stream, factories included.

    Raises:
        RuntimeError: at the end, if another number of operations ran.
    """
    Floor._results = iter([result for _, result in stream.items])
    before = lazy_tensor._CLASS
    for kinds in _KINDS:
        kinds.append(Floor)
    lazy_tensor.use_class(Floor)  # pyright: ignore[reportArgumentType]  (`empty` has no tensor to go by)
    # Attention is one operation on the `jax` device, and so it is here.
    ours = mock.patch.object(attention_choice, "_are_ours", lambda *_: True)
    fused = mock.patch.object(attention_choice, "_choice", lambda *_: (True, True))
    try:
        with ours, fused:
            yield
    finally:
        lazy_tensor.use_class(before)
        for kinds in _KINDS:
            kinds.remove(Floor)
    left = len(list(Floor._results))
    if left:
        raise RuntimeError(f"{left} of {len(stream.items)} operations of the stream did not run")
