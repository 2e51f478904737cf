"""Whether a tensor was given hooks meanwhile, without a look at each tensor.

A tensor has no table of hooks before its first hook: Python sets the table, through the class of
the tensor. So while no tensor on the device is given one, those without hooks have none.

>>> weight = torch.ones(2, device="jax", requires_grad=True)
>>> before = given.last
>>> _ = weight.sum()
>>> given.last is before
True
>>> hook = weight.register_hook(print)
>>> given.last is before
False
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import HOOK_FIELDS


class _Given:
    """Attributes: `last`, another object whenever some tensor is given a table of hooks."""

    def __init__(self):
        self.last = object()


given = _Given()


class HookTable:
    """A table of hooks as an attribute: torch's own, which says when it is set.

    Args:
        field: torch's attribute.
    """

    def __init__(self, field: Any):
        """See the class."""
        self._field = field

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        """The table, or None; of the class, this attribute."""
        return self if tensor is None else self._field.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, table: Any) -> None:
        """Set it, and say so."""
        self._field.__set__(tensor, table)
        given.last = object()

    def __delete__(self, tensor: torch.Tensor) -> None:
        """Let the tensor have none."""
        self._field.__delete__(tensor)


def tell(kind: type[torch.Tensor]) -> None:
    """Let tensors of a class say when they are given a table."""
    for name, field in HOOK_FIELDS.items():
        setattr(kind, name, HookTable(field))
