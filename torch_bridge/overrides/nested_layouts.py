"""Nested tensors, which the `jax` device does not support: each call raises, with the fix.

XLA's programs have fixed shapes, so rows of many lengths are padded to one, and a mask tells what
is real. Torch would fail inside its own C++ code, or name an internal operator.

>>> rows = [torch.ones(2), torch.ones(3)]
>>> torch.nested.nested_tensor(rows, device="jax")  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
NotImplementedError: torch.nested.nested_tensor: the jax device has no nested tensors; pad ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import jagged_class
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.engine.recording import lazy_tensor


def refuse(what: str) -> NoReturn:
    """Raise that there are no nested tensors, with the fix.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{what}: the jax device has no nested tensors; pad the rows to one length with "
        "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), or a nested tensor on the CPU "
        "with .to_padded_tensor(0.0), move that to the device, and mask the real elements "
        "(attn_mask=, src_key_padding_mask=, torch.where)"
    )


def register() -> list[torch.library.Library]:
    """Replace torch's functions that make nested tensors, and the operators below them.

    Returns:
        What keeps the operators registered.
    """
    for name in _FUNCTIONS:
        function = getattr(torch.nested, name, None)
        if function is not None:
            setattr(torch.nested, name, _refusing(name, function))
    if jagged_class is not None:
        jagged_class.to = _moving(torch.Tensor.to)
    for name in _OPERATORS:
        dispatch.SPECIAL[f"aten::{name}"] = functools.partial(_raise_for, name)
    dispatch.SPECIAL["aten::_nested_tensor_from_mask_left_aligned"] = _not_left_aligned
    library = torch.library.Library("aten", "IMPL")
    library.impl("_to_copy", lambda *_args, **_kwargs: refuse("Tensor.to"), _STRIDED)
    return [library]


_STRIDED = "NestedTensorPrivateUse1"
"""The dispatch key of nested tensors of one memory."""


_FUNCTIONS = (
    *("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow"),
    "masked_select",
)
_OPERATORS = (
    *("_nested_view_from_buffer", "_nested_view_from_jagged", "_nested_tensor_from_mask"),
    *("_nested_from_padded", "_nested_tensor_from_tensor_list", "_nested_view_from_buffer_copy"),
    "_nested_view_from_jagged_copy",
)


def _is_ours(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_ours, value))
    if isinstance(value, str):
        return value.partition(":")[0] in naming.OURS
    if isinstance(value, torch.device):
        return value.type in naming.OURS
    return isinstance(value, lazy_tensor.LazyTensor)


def _refusing(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def make(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_ours, (*args, *kwargs.values()))):
            refuse(f"torch.nested.{name}")
        return theirs(*args, **kwargs)

    return make


def _moving(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_ours, (*args, *kwargs.values()))):
            refuse("Tensor.to")
        return theirs(self, *args, **kwargs)

    return to


def _raise_for(name: str, _args: Any, _kwargs: Any) -> NoReturn:
    refuse(f"aten.{name}")


def _not_left_aligned(_args: Any, _kwargs: Any) -> bool:
    """What a `TransformerEncoder` checks before it converts its padded input to a nested tensor."""
    return False
