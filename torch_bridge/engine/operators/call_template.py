"""The arguments of one call: a key that equal calls share, and what differs between them.

Two calls that differ only in the elements of their tensors, or in floats such as a learning rate,
are computed by the same tape entry. A `CallTemplate` gives them the same key, with which a handler
looks up its prepared `Signature`. That happens hundreds of times in a training step, so a key is
made in one pass, of interned avals and plain values.

>>> flatten = CallTemplate(torch.ops.aten.add.Tensor)
>>> key, tensors, scalars = flatten((torch.ones(2, device="jax"), 1), {"alpha": 3})
>>> key[0].meta.size, key[1:], len(tensors)
((2,), (1, 'alpha', 3, torch.float32), 1)
>>> key == flatten((torch.zeros(2, device="jax"), 1), {"alpha": 3})[0]
True
>>> flatten.template((tensors[0], 1), {"alpha": 3})
((Slot(index=0), 1), {'alpha': 3}, 0)

Each lowering names the float arguments that are *lifted*: inputs of the program, not constants in
it. Other floats stay in the key, and another value means another program; as text where equality
does not tell -0.0 from 0.0, and NaN is unequal to itself. `template` gives what all
calls with one key have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.values.metas import Lift, Slot, map_leaves
from isoshard.torch_bridge.engine.values.symbolic_numbers import settled
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.lowerings import registry

_default_dtype = torch.get_default_dtype
_LIFTED = object()
"""Stands in a key for a lifted float, whatever its value."""


class CallTemplate:
    """Turns the arguments of one overload into a key, tensors and lifted floats."""

    __slots__ = ("func", "lift_kwargs", "lift_positions")

    def __init__(self, func: OpOverload):
        """Look up which arguments are lifted."""
        self.func = func
        lowering = registry.find(func)
        lift = lowering.lift if lowering else ()
        names = [argument.name for argument in schema_of(func).arguments]
        self.lift_positions = frozenset(i for i, name in enumerate(names) if name in lift)
        self.lift_kwargs = frozenset(lift)

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[Any], list[Any]]:
        """Flatten a call's arguments: (key, tensors, lifted floats)."""
        key: list[Any] = []
        tensors: list[Any] = []
        scalars: list[Any] = []
        cls = lazy_tensor._CLASS  # read directly, here and below: this runs for every operation
        for position, arg in enumerate(args):
            if type(arg) is cls:
                tensors.append(arg)
                key.append(arg._aval)
            else:
                self._static(arg, position in self.lift_positions, key, tensors, scalars)
        for name, arg in kwargs.items() if kwargs else ():
            key.append(name)
            if type(arg) is cls:
                tensors.append(arg)
                key.append(arg._aval)
            else:
                self._static(arg, name in self.lift_kwargs, key, tensors, scalars)
        key.append(_default_dtype())  # which the dtype of `i / 2` is, for integers i
        return tuple(key), tensors, scalars

    def _static(
        self,
        arg: Any,
        lift: bool,
        key: list[Any],
        tensors: list[lazy_tensor.LazyTensor],
        scalars: list[Any],
    ) -> None:
        kind = type(arg)
        if arg is None or kind is int or kind is str:
            key.append(arg)
        elif kind is float or kind is torch.SymFloat:
            if kind is torch.SymFloat:
                arg = settled(arg)
                kind = type(arg)
                if kind is torch.SymFloat and arg.node.is_integer:
                    raise RuntimeError(
                        f"{self.func} gets an int that a captured step counts up ({arg}), whose "
                        "dtype a float would change; convert it with float(), or to a tensor"
                    )
            if lift or kind is torch.SymFloat:
                if not lift:
                    raise RuntimeError(
                        f"{self.func} needs a constant where a captured step has a changing number "
                        f"({arg}); compute it from a tensor, or keep it out of the compiled step"
                    )
                scalars.append(arg)
                key.append(_LIFTED)
            else:
                key.append((float, arg if arg and arg == arg else repr(arg)))
        elif kind is bool or kind is complex:
            key.append((kind, repr(arg)))
        elif kind is list or kind is tuple:
            key.append((len(arg),))
            for leaf in arg:
                if type(leaf) is lazy_tensor._CLASS:
                    tensors.append(leaf)
                    key.append(leaf._aval)
                else:
                    self._static(leaf, lift, key, tensors, scalars)
        elif isinstance(arg, torch.Tensor):
            tensor = import_tensor(self.func, arg)
            tensors.append(tensor)
            key.append(tensor._aval)
        else:
            key.append(arg)

    def template(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """The same arguments with `Slot` and `Lift` for what a key abstracts from."""
        slots = lifts = 0

        def mark(lift: bool) -> Callable[[Any], Any]:
            def leaf(arg: Any) -> Any:
                nonlocal slots, lifts
                if isinstance(arg, torch.Tensor):
                    slots += 1
                    return Slot(slots - 1)
                if lift and type(arg) in (float, torch.SymFloat):
                    lifts += 1
                    return Lift(lifts - 1)
                return arg

            return leaf

        positional = tuple(
            map_leaves(mark(i in self.lift_positions), arg) for i, arg in enumerate(args)
        )
        named = {
            name: map_leaves(mark(name in self.lift_kwargs), arg) for name, arg in kwargs.items()
        }
        return positional, named, lifts


def import_tensor(func: Any, tensor: torch.Tensor) -> lazy_tensor.LazyTensor:
    """Let a zero-dimensional CPU tensor take part, as every torch device does; reject others.

    While `jax_function` runs code that may be written for the CPU, every CPU tensor takes part.
    """
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return tensor
    welcome = tensor.dim() == 0 or func.name() in WELCOMING
    if tensor.device.type == "cpu" and (welcome or tapes.takes_constants()):
        return brought(tensor)
    raise RuntimeError(
        f"{func} got tensors on two devices: one on {naming.current()} and one on "
        f"{tensor.device} (shape "
        f"{tuple(tensor.shape)}, {tensor.dtype}). Move it with {naming.moving()}, or place it with "
        "isoshard.shard(tensor, mesh, spec)."
    )


def brought(tensor: torch.Tensor) -> lazy_tensor.LazyTensor:
    """A CPU tensor on the device; a captured step takes its elements anew in each replay."""
    value = lazy_tensor.host_value(tensor)
    lazy_tensor.note_operand(value, tensor, lambda now: now)
    return lazy_tensor.fresh(Aval.contiguous(tuple(tensor.shape), tensor.dtype), value)


WELCOMING = {
    *("aten::index.Tensor", "aten::index_put"),
    *("aten::_foreach_addcmul.Tensor", "aten::_foreach_addcdiv.Tensor"),
}
"""Operators that take CPU tensors of any rank, as on every device: indices, numbers."""
