"""Whether some tensor on the device was changed meanwhile, without a look at each tensor.

Python sets and deletes every attribute of a tensor through the tensor's class: its memory (`data`),
`grad`, `requires_grad`, tables of hooks, what a program gave it. So does whoever asks for its
`__dict__`. Of the methods that C++ runs, `requires_grad_`, `detach_` and `retain_grad` say it here.

Not heard of are a hook that is put into a table that is there, a gradient that C++ puts where there
was none, and a write in place that makes a frozen tensor require a gradient: `TensorGuard` looks at
these. Nor is what goes past the tensor's class: `torch.Tensor.requires_grad_(tensor)`,
`object.__setattr__(tensor, "grad", ..)`.

>>> weight = torch.ones(2, device="jax", requires_grad=True)
>>> before = changes.last
>>> _ = weight.sum()
>>> changes.last is before
True
>>> weight.requires_grad = False
>>> changes.last is before
False
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import HOOK_FIELDS


class _Changes:
    """What happened last.

    Attributes:
        last: another object whenever a tensor may have been changed.
        tables: another object whenever a tensor gets a table of hooks, or another `__dict__`.
    """

    def __init__(self):
        self.last = self.tables = object()

    def notify(self) -> None:
        """A tensor may have been changed."""
        self.last = object()


changes = _Changes()

_set = torch.Tensor.__setattr__
_delete = torch.Tensor.__delattr__
_NAMESPACE: Any = torch.Tensor.__dict__["__dict__"]
namespace = _NAMESPACE.__get__
"""The attributes that Python keeps of a tensor; the caller changes none."""


class TrackedTensor(torch.Tensor):
    """A tensor that reports changes of its attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        _set(self, name, value)
        changes.notify()
        if name in _TABLES:
            changes.tables = changes.last

    def __delattr__(self, name: str) -> None:
        """Delete an attribute."""
        _delete(self, name)
        changes.notify()

    @property
    def __dict__(self) -> dict[str, Any]:
        """What Python keeps of the tensor; the caller may change it."""
        changes.notify()
        return namespace(self)

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        _NAMESPACE.__set__(self, attributes)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As torch's."""
        super().requires_grad_(requires_grad)
        changes.notify()
        return self

    def detach_(self) -> Any:
        """As torch's."""
        super().detach_()
        changes.notify()
        return self

    def retain_grad(self) -> None:
        """As torch's."""
        super().retain_grad()
        changes.notify()


_TABLES = frozenset({*HOOK_FIELDS, "__dict__"})
