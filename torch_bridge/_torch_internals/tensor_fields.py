"""Private fields of tensors and autograd's nodes, and how a tensor of a subclass is created.

>>> import torch
>>> tensor = torch.ones(2, requires_grad=True)
>>> gradient_hooks(tensor) is None
True
>>> before, after = (sequence_number((tensor * 1).grad_fn) for _ in range(2))
>>> before < after
True
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .declared import NAMES, NO_DEVICE
from .undocumented import DisableTorchFunctionSubclass


def _plain_function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


make_wrapper_subclass: Callable[..., Any] = NAMES.bind(
    "torch.Tensor._make_wrapper_subclass",
    why="makes a tensor without memory, of any sizes, strides, dtype and device",
    without=NO_DEVICE,
)

no_torch_function: Any = NAMES.bind(
    "torch._C._disabled_torch_function_impl",
    otherwise=classmethod(_plain_function),
    why="is the `__torch_function__` of a class that has none, and costs nothing",
    without="each operation is recorded some microseconds slower",
)

swap_contents: Callable[[torch.Tensor, torch.Tensor], None] = NAMES.bind(
    "torch._C._swap_tensor_impl",
    why="lets a view that is turned in place (`t_`, `unsqueeze_`) stay the same object",
    without="turning a view in place raises",
)

is_view: Callable[[torch.Tensor], bool] = NAMES.bind(
    "torch.Tensor._is_view",
    why="reports whether autograd takes a tensor for a view",
    without="turning a tensor in place raises",
)

jagged_class: Any = NAMES.bind(
    "torch.nested._internal.nested_tensor.NestedTensor",
    otherwise=None,
    why="is the class of jagged tensors, whose `to` refuses the device",
    without="moving a jagged tensor to the device raises torch's or another error",
)

viewed: Callable[[torch.Tensor], torch.Tensor | None] = NAMES.field(
    "torch.Tensor._base",
    why="is what autograd takes a tensor for a view of",
    without="a parallel style that `torch.compile` traces raises",
)

parse_to: Callable[..., Any] = NAMES.bind(
    "torch._C._nn._parse_to",
    why="reads the arguments of `Tensor.to`",
    without="`to` on tensors of the device raises",
)

backward_hooks: Callable[[torch.Tensor], Any] = NAMES.field(
    "torch.Tensor._backward_hooks",
    why="has the hooks on a tensor's gradient",
    without="`xm.optimization_barrier_` of a module raises",
)

writes: Callable[[torch.Tensor], int] = NAMES.field(
    "torch.Tensor._version",
    why="counts the writes to a tensor's memory",
    without="`torch_function` of a function that reads tensors on the CPU raises",
)

gradient_hooks: Callable[[torch.Tensor], Any] = NAMES.field(
    "torch.Tensor._post_accumulate_grad_hooks",
    why="has the hooks that see a leaf's gradient when it is complete",
    without="sharding a leaf that requires a gradient raises",
)


HOOK_FIELDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The names of the two."""


class _Plain(torch.Tensor):
    """Of no class of torch's: so is a tensor on the device."""


_is_parameter = NAMES.field(
    "torch.nn.Parameter._is_param",
    example=lambda: torch.nn.Parameter(torch.ones(1, device="cpu").as_subclass(_Plain)),
    why="makes a parameter of a tensor on the device",
    without="each parameter is made by way of one more tensor, and takes longer",
)

PARAMETER_FIELD = "_is_param" if isinstance(_is_parameter, operator.attrgetter) else None
"""The entry of such a parameter's `__dict__`; None if torch marks parameters otherwise."""


def put_hooks(tensor: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """Set the hooks of a tensor that `all_hooks` returned before its memory was swapped.

    C++ stores what calls them with the memory, so they have to be set again.
    """
    before, after = hooks
    if before:
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


def _both_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    return backward_hooks(tensor), gradient_hooks(tensor)


_fields = (backward_hooks, gradient_hooks)
all_hooks: Callable[[torch.Tensor], tuple[Any, Any]] = (
    operator.attrgetter(*HOOK_FIELDS)  # in one go
    if all(isinstance(field, operator.attrgetter) for field in _fields)
    else _both_hooks
)


def _node() -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        return torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn


_sequence = NAMES.field(
    "torch.autograd.graph.Node._sequence_nr",
    example=_node,
    why="reports whether a node of the graph was made before a region or in it",
    without="`xs.scan_layers`, gradient accumulation and checkpointed regions raise",
)


def sequence_number(node: Any) -> int:
    """The sequence number of a node of this thread's autograd graph; later nodes have higher ones.

    Args:
        node: a `grad_fn`.
    """
    return _sequence(node)()


current_node: Callable[[], Any] = NAMES.bind(
    "torch._C._current_autograd_node",
    otherwise=lambda: None,
    why="reports that a gradient is being computed, where `torch.func` mixes dtypes, and of what",
    without="such gradients raise as CPU torch's operations of mixed dtypes do, and operations of "
    "backward have no module",
)

next_sequence_number: Callable[[], int] = NAMES.bind(
    "torch._C._autograd._get_sequence_nr",
    otherwise=lambda: 0,
    why="is the number that the next node of the graph gets: by it an operation of backward has "
    "the module and line of the forward operation, in traces and plans",
    without="traces and plans name the line of `backward()` for all operations of backward",
)

function_of: Callable[[type], type] = NAMES.state(
    "torch.autograd.Function._forward_cls",
    why="is the function that a context belongs to",
    without="the gradient of a loop's gradient, where there is none, raises AttributeError in "
    "place of the reason",
).of


def forward_levels() -> int:
    """How many levels of forward-mode differentiation are open, less one."""
    return _LEVEL.resolve(-1)


_LEVEL = NAMES.state(
    "torch.autograd.forward_ad._current_level",
    why="reports whether forward-mode differentiation is on, for which attention has no operator",
    without="attention under `torch.func.jvp` raises, as its operator has no forward gradient",
)

rebuild_parameter: Any = NAMES.bind(
    "torch._utils._rebuild_parameter",
    why="is what a pickled parameter names",
    without="parameters on the device cannot be pickled, nor saved by `torch.save`",
)

rebuild_from_cpu: Any = NAMES.bind(
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    why="is what a pickled tensor of another device names, and `weights_only=True` allows",
    without="tensors on the device cannot be pickled, nor saved by `torch.save`",
)
