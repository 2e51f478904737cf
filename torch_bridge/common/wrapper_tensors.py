"""Tensors that are made of other tensors: quantized weights, float8 factors, states of 8 bits.

torch calls them traceable wrapper subclasses: `__tensor_flatten__` names the inner tensors,
`__tensor_unflatten__` makes a wrapper of others. torchao's quantized weights are such tensors, and
whoever writes those two methods has one. What moves, shards or saves a tensor does so with each of
the inner tensors, whose names follow that of the wrapper.

>>> class Scaled(torch.Tensor):
...     @staticmethod
...     def __new__(cls, q, scale):
...         return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)
...     def __init__(self, q, scale):
...         self.q, self.scale = q, scale
...     def __tensor_flatten__(self):
...         return ["q", "scale"], None
...     @staticmethod
...     def __tensor_unflatten__(inner, context, size, stride):
...         return Scaled(**inner)
...     @classmethod
...     def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
...         raise NotImplementedError(func)
>>> weight = Scaled(torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1))
>>> inner = expanded({"weight": weight, "bias": torch.zeros(2)})
>>> {name: tuple(tensor.shape) for name, tensor in inner.items()}
{'weight.q': (2, 3), 'weight.scale': (2, 1), 'bias': (2,)}
>>> type(joined({"weight": weight, "bias": torch.zeros(2)}, inner)["weight"]).__name__
'Scaled'

Tensors with a layout of their own (DTensor, a tensor on the `jax` device) are none of these, nor
are nested tensors, whose sizes are not numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_LAYOUT = "device_mesh"
"""An attribute of tensors that are sharded themselves: DTensor, and those on the device."""


def is_wrapper(x: object) -> bool:
    """Whether `x` is a tensor made of other tensors, see the module's description.

    Example:
        >>> is_wrapper(torch.ones(3))
        False
    """
    kind = type(x)
    return (
        hasattr(kind, "__tensor_flatten__")
        and isinstance(x, torch.Tensor)
        and not hasattr(kind, _LAYOUT)
        and not x.is_nested
    )


def inner_tensors(wrapper: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper is made of, by their attributes; of nested wrappers `outer.inner`.

    Args:
        wrapper: for which `is_wrapper` is true.
    """
    return expanded((name, getattr(wrapper, name)) for name in _flattened(wrapper)[0])


def rebuilt(wrapper: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A wrapper as another one, made of other tensors.

    Args:
        wrapper: its class, shape and metadata are those of the result, also whether it is a
            parameter and requires a gradient.
        inner: tensors by the names of `inner_tensors(wrapper)`.
    """
    return WrapperKind.of(wrapper).build(inner)


def expanded(named: Mapping[str, T] | Iterable[tuple[str, T]]) -> dict[str, T]:
    """Named values, with the inner tensors of each wrapper in its place.

    Args:
        named: tensors, or anything else, by name.
    """
    result: dict[str, Any] = {}
    pairs: Any = named.items() if isinstance(named, Mapping) else named
    for name, value in pairs:
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            for inner, tensor in inner_tensors(value).items():
                result[f"{name}.{inner}"] = tensor
        else:
            result[name] = value
    return result


def joined(
    named: Mapping[str, torch.Tensor], inner: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The opposite of `expanded`: wrappers, and other tensors, made of expanded ones.

    Args:
        named: the tensors that were expanded.
        inner: others by the expanded names; a tensor without any is left out.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if not is_wrapper(tensor):
            result.update({name: inner[name]} if name in inner else {})
        elif own := _below(inner, name):
            result[name] = rebuilt(tensor, own)
    return result


def _below(inner: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    start = f"{name}."
    return {key[len(start) :]: t for key, t in inner.items() if key.startswith(start)}


def _flattened(wrapper: torch.Tensor) -> tuple[list[str], Any]:
    flatten: Any = getattr(wrapper, "__tensor_flatten__")  # noqa: B009
    return flatten()


@dataclasses.dataclass(frozen=True, eq=True)
class WrapperKind:
    """All of a wrapper but its inner tensors.

    Attributes:
        cls: its class.
        inner: the attributes of the inner tensors, each with its kind where it is a wrapper.
        context: what else its class needs to make one.
        dtype: the dtype that it has.
        size: its shape.
        stride: its strides.
        requires_grad: whether it requires a gradient.
        is_parameter: whether it is a parameter.
    """

    cls: type[torch.Tensor]
    inner: tuple[tuple[str, WrapperKind | None], ...]
    context: Any = dataclasses.field(hash=False)
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool

    @classmethod
    def of(cls, wrapper: torch.Tensor) -> WrapperKind:
        """The kind of a wrapper."""
        names, context = _flattened(wrapper)
        tensors = [(name, getattr(wrapper, name)) for name in names]
        return cls(
            type(wrapper),
            tuple((name, cls.of(t) if is_wrapper(t) else None) for name, t in tensors),
            context,
            wrapper.dtype,
            wrapper.size(),
            wrapper.stride(),
            wrapper.requires_grad,
            isinstance(wrapper, torch.nn.Parameter),
        )

    def names(self) -> Iterator[str]:
        """The names of the inner tensors, as `inner_tensors` has them."""
        for name, kind in self.inner:
            yield from [name] if kind is None else [f"{name}.{key}" for key in kind.names()]

    def build(self, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A wrapper of this kind.

        Args:
            inner: tensors by the names of `names()`.
        """
        tensors = {
            name: inner[name] if kind is None else kind.build(_below(inner, name))
            for name, kind in self.inner
        }
        unflatten: Any = getattr(self.cls, "__tensor_unflatten__")  # noqa: B009
        new = unflatten(tensors, self.context, self.size, self.stride)
        if self.is_parameter:
            return torch.nn.Parameter(new, requires_grad=self.requires_grad)
        return new.requires_grad_() if self.requires_grad else new
