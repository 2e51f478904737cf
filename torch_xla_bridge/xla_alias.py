"""The device string `"xla"`: another name of the `jax` device, for scripts of torch_xla.

torch parses `"xla"` in every build, and knows no kernels for it. `register` gives the dispatch key
XLA the kernels that make tensors on the `jax` device, so that `torch.zeros(2, device="xla")`,
`nn.Linear(2, 3, device="xla")`, `torch.set_default_device("xla")` and `x.to("xla:0")` work; from
then on tensors say that they are on `xla:0`.

A few functions of torch ask C++ which of several xla devices is meant, and C++ refuses where
torch_xla is not linked. They are wrapped: `torch.Tensor.to`, `torch.tensor`, `torch.as_tensor`,
`torch.asarray`, and `FakeTensor`, with which dynamo traces. `torch.autocast` and what tells of it
take `xla` for `jax`, and bfloat16 where no dtype is named, as torch_xla does; `torch.compile` takes
`backend="openxla"` for ours. Arithmetic and comparisons with a CPU tensor beside ours move that, as
torch_xla does, and class numbers may be floats. Nothing here happens before `drop_in.install` asks
for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge.kit import (
    NEW_FAKE,
    SET_AUTOCAST_DTYPE,
    WELCOMING,
    OpOverload,
    ShardingType,
    XLAShardedTensor,
    after_import,
    device,
    device_slot,
    dispatch,
    global_tensors,
    naming,
)

_DEVICE = torch.device("xla", 0)
_done = False


def register() -> None:
    """Make `"xla"` mean the `jax` device, and tensors call it so. A second call does nothing."""
    global _done
    if _done:
        return
    _done = True
    device.register()
    device.add_kernels("XLA")
    device_slot.set_device_module("xla", device.DeviceModule)
    for devices in (device_slot.FOREACH_DEVICES, device_slot.FUSED_DEVICES):
        devices.wrap(_with_xla)
    for owner, name in _WITH_DEVICE:
        setattr(owner, name, _indexed(getattr(owner, name)))
    _rename_autocast()
    _rename_backend()
    WELCOMING.update(f"aten::{name}.Tensor" for name in _WITH_CPU_OPERAND)
    _take_float_classes()
    global_tensors.install()
    after_import("torch.distributed.tensor", _from_local)
    NEW_FAKE.wrap(_on_jax)
    naming.use("xla")


_WITH_CPU_OPERAND = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
_WITH_DEVICE = (
    (torch.Tensor, "to"),
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
)


def _indexed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with every device `xla` among its arguments replaced by `xla:0`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and _is_bare(args[1]):
            args = (args[0], _DEVICE, *args[2:])
        if "device" in kwargs and _is_bare(kwargs["device"]):
            kwargs["device"] = _DEVICE
        return function(*args, **kwargs)

    return wrapped


def _is_bare(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "xla" and value.index is None
    return isinstance(value, str) and value == "xla"


def _rename_autocast() -> None:
    """Rename `xla` to `jax` in calls of autocast, whose dispatch key is `jax` for our tensors."""
    threads = _Threads(SET_AUTOCAST_DTYPE.resolve())
    for owner, name in _BY_AUTOCAST:
        setattr(owner, name, _renamed(getattr(owner, name), threads))


# Activation checkpointing reads the last four to restore them when it computes again.
_BY_AUTOCAST = (
    (torch.autocast, "__init__"),
    (torch, "is_autocast_enabled"),
    (torch, "set_autocast_enabled"),
    (torch, "get_autocast_dtype"),
    (torch, "set_autocast_dtype"),
)


class _Threads(threading.local):
    """Lets autocast start with bfloat16 in each thread, as torch_xla does; torch's is float16.

    Args:
        set_dtype: torch's own, which is of one thread.
    """

    def __init__(self, set_dtype: Callable[..., Any]):
        """See the class; it is called anew by the first use in a thread."""
        set_dtype("jax", torch.bfloat16)

    def begin(self) -> None:
        """Called where a thread uses autocast; the class sets its dtype at the first access."""


def _renamed(function: Callable[..., Any], threads: _Threads) -> Callable[..., Any]:
    """The function, with the device type `xla` among its arguments replaced by `jax`."""

    def jax_for_xla(arg: Any) -> Any:
        return "jax" if isinstance(arg, str) and arg == "xla" else arg

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        threads.begin()
        named = {name: jax_for_xla(arg) for name, arg in kwargs.items()}
        return function(*map(jax_for_xla, args), **named)

    return wrapped


def _rename_backend() -> None:
    """Replace torch's own `openxla` backends: they call functions that only torch_xla has."""
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") in ("openxla", "openxla_eval"):
            kwargs["backend"] = "isoshard"
        return original(*args, **kwargs)

    torch.compile = compile


def _take_float_classes() -> None:
    """Let `nll_loss` and `cross_entropy` take classes of floating dtypes."""
    aten = torch.ops.aten
    for func, position in (
        (aten.nll_loss_forward.default, 1),
        (aten.nll_loss_backward.default, 2),
        (aten.nll_loss2d_forward.default, 1),
        (aten.nll_loss2d_backward.default, 2),
    ):
        dispatch.SPECIAL[func.name()] = _with_classes(func, position)


def _with_classes(func: OpOverload, position: int) -> dispatch.Handler:
    """The handler of an operator, with its classes as integers instead of floats."""
    handle = dispatch.functional_handler(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        classes = args[position]
        if classes.is_floating_point():
            args = (*args[:position], classes.to(torch.int64), *args[position + 1 :])
        return handle(args, kwargs)

    return handler


def _from_local() -> None:
    """Make `DTensor.from_local` over a mesh of device type `xla` shard its tensor, as torch_xla's.

    The tensor is the global one, as `to_local` returns it. In a manual region it is the local
    shard.
    """
    from torch.distributed.tensor import DTensor

    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(
        local_tensor: torch.Tensor, device_mesh: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(device_mesh, "device_type", None) not in naming.OURS:
            return original(local_tensor, device_mesh, *args, **kwargs)
        is_tensor = isinstance(local_tensor, torch.Tensor)
        if not is_tensor or getattr(local_tensor, "sharding_type", None) == ShardingType.MANUAL:
            return XLAShardedTensor.from_local(local_tensor, device_mesh, *args, **kwargs)
        placements = args[0] if args else kwargs.get("placements")
        return XLAShardedTensor(local_tensor.to("jax"), device_mesh, placements)

    DTensor.from_local = staticmethod(from_local)


def _with_xla(devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*devices(), "xla"]


def _on_jax(original: Any) -> Any:
    """Keep dynamo's fake tensors on `jax`: on `xla` they would end the process."""

    @functools.wraps(original)
    def __new__(cls: Any, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if device is not None and device.type == "xla":
            device = torch.device("jax", 0)
        return original(cls, fake_mode, elem, device, *args, **kwargs)

    return __new__
