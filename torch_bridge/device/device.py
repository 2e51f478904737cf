"""The `jax` device: its registration in torch, and its module `torch.jax`.

torch has one device type for backends that live outside its tree, PrivateUse1; here it is renamed
`jax`, so that `device="jax"`, `.to("jax")`, `torch.manual_seed` and `torch.autocast("jax")` find
us. The tensors themselves carry torch's in-tree C++ device `lazy`: with it the autograd engine runs
backward on the caller's thread and every error arrives as an exception, which PrivateUse1 does not
give to a backend written in Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import torch

from isoshard.core.errors import PrivateNameError
from isoshard.core.runtime.caches import CALLS, Interned
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload, device_slot, dispatcher
from isoshard.torch_bridge._torch_internals.traced import TRACED_TYPES
from isoshard.torch_bridge.engine.operators import dispatch, generator_argument, uninitialized
from isoshard.torch_bridge.engine.operators.view_operators import check_strides
from isoshard.torch_bridge.engine.recording import lazy_tensor, random_state
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.signatures.shape_checks import check_stride_count
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.value import Aval

from ..common import naming
from ..execution.runtime import sync
from ..overrides import (
    adafactor,
    addresses,
    as_tensor,
    autocast,
    grad_scaler,
    gradients_of_leaves,
    inplace_views,
    loaded_state,
    nested_layouts,
    pickling,
    swap_parameters,
)
from . import accelerator, composites
from .memory import get_memory_info

_KEYS = ("PrivateUse1", "Lazy")
_LIBRARIES: list[torch.library.Library] = []


class DeviceModule:
    """`torch.jax`: the functions that torch calls of a device type's module."""

    _initialized = True

    @staticmethod
    def device(index: Any = None) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing for the one logical device; another raises."""
        naming.check_index(f"jax:{index}" if isinstance(index, int) and index >= 0 else None)
        return contextlib.nullcontext()

    @staticmethod
    def is_initialized() -> bool:
        """JAX starts by itself."""
        return True

    @staticmethod
    def is_available() -> bool:
        """JAX always has a device."""
        return True

    @staticmethod
    def current_device() -> int:
        """The one logical device."""
        return 0

    @staticmethod
    def device_count() -> int:
        """One logical device: a mesh is one machine to its user."""
        return 1

    @staticmethod
    def is_bf16_supported() -> bool:
        """XLA computes in bfloat16 everywhere."""
        return True

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """The kind of JAX's first device, such as `TPU v5 lite` or `cpu`."""
        return jax.devices()[0].device_kind

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Execute what is recorded and wait for it."""
        sync(wait=True)

    @staticmethod
    def set_device(device: Any) -> None:
        """Does nothing for the one logical device; another raises."""
        naming.check_index(f"jax:{device}" if isinstance(device, int) else device)

    @staticmethod
    def empty_cache() -> None:
        """Does nothing: JAX frees arrays without references."""

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """As `torch.accelerator.memory_stats`."""
        return torch.accelerator.memory_stats(0)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Bytes of live arrays."""
        return get_memory_info()["bytes_used"]

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """The most bytes of live arrays since the process began."""
        return get_memory_info()["peak_bytes_used"]

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Free and total bytes of memory."""
        return accelerator.free_and_total()

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """Warns: JAX keeps the peak for the life of the process."""
        accelerator.keep_peaks()

    @staticmethod
    def current_stream(device: Any = None) -> type[DeviceModule]:
        """The only stream: what is recorded runs in order, and this module can wait for it."""
        return DeviceModule

    @staticmethod
    def stream(stream: Any = None) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing: there is one stream."""
        return contextlib.nullcontext()

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed the device's random numbers."""
        random_state.STATE.manual_seed(seed)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Seed the device's random numbers (called by `torch.manual_seed`)."""
        random_state.STATE.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Seed and counter as 16 bytes."""
        return torch.frombuffer(bytearray(random_state.STATE.to_bytes()), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Restore what `get_rng_state` gave."""
        random_state.STATE.from_bytes(bytes(state.tolist()))

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """What `torch.autocast("jax", ..)` may cast to."""
        return list(autocast.DTYPES)


def register() -> None:
    """Register the device with torch, once, when the torch bridge is first used.

    Raises:
        RuntimeError: another package has already renamed torch's PrivateUse1 device.
    """
    if _LIBRARIES:
        return
    name = device_slot.device_name()
    if name not in ("privateuseone", "jax"):
        raise RuntimeError(
            f"torch's slot for devices outside its tree is already taken by {name!r}; isoshard's "
            "`jax` device needs a process without it. Do not import that package together with "
            "isoshard.torch_bridge."
        )
    try:
        device_slot.set_up_device("jax", DeviceModule)
    except PrivateNameError as error:
        _refuse(str(error))
        return
    device_slot.set_device_module("lazy", DeviceModule)
    accelerator.register(DeviceModule)
    for key in _KEYS:
        with optional():
            add_kernels(key)
    for kernels in (autocast.register, composites.register, nested_layouts.register):
        with optional():
            _LIBRARIES.extend(kernels())
    for feature in (
        _let_loaders_pin,
        as_tensor.register,
        swap_parameters.register,
        pickling.register,
        addresses.register,
        grad_scaler.register,
        gradients_of_leaves.register,
        loaded_state.register,
        adafactor.register,
        _join_lists,
        _join_traced_types,
    ):
        with optional():
            feature()
    inplace_views.register(lazy_tensor.LazyTensor)


def _refuse(reason: str) -> None:
    """Register the name of the device only: creating a tensor there raises."""
    torch.utils.rename_privateuse1_backend("jax")
    device_slot.set_device_module("jax", DeviceModule)
    accelerator.register(DeviceModule)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise PrivateNameError(reason)

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", kernel, "PrivateUse1")
    library.impl("empty_strided", kernel, "PrivateUse1")
    _LIBRARIES.append(library)


def _let_loaders_pin() -> None:
    """Let `pin_memory()` of a CPU tensor pin for CUDA where there is one, and copy elsewhere.

    A `DataLoader` with `pin_memory=True` calls it for the device that torch takes for the machine's
    own. That is ours as soon as there is one, and JAX has no page-locked memory for torch to use.
    """
    torchs: Any = torch.library.get_kernel("aten::_pin_memory", "CPU")
    keys = dispatcher.DispatchKeySet(dispatcher.DispatchKey.CPU)

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if device is None or torch.device(device).type in ("jax", "cpu"):
            device = "cuda" if torch.cuda.is_available() else None
        if device is None and not lazy_tensor.used():
            device = accelerator.without_ours()  # torch raises where there is none of these
            if device is None:
                raise RuntimeError(accelerator.NONE)
        if device is None:
            return tensor.clone()
        return torchs.call_boxed(keys, tensor, torch.device(device))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", pin, "CPU")
    _LIBRARIES.append(library)


def add_kernels(key: str) -> None:
    """Let a dispatch key make tensors on the device, and copy to it.

    Args:
        key: torch's name of it, such as `"PrivateUse1"`.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, key)
    library.impl("empty_strided", _empty_strided, key)
    library.impl("_efficientzerotensor", _zeros, key)
    library.impl("_copy_from", _copy_from, key)
    library.impl("_local_scalar_dense", _scalar, key)
    _LIBRARIES.append(library)
    for factory in _FACTORIES:
        packet, _, overload = factory.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if func is not None:
            library.impl(factory, _factory(func), key)


def _join_lists() -> None:
    """Add our class and device to torch's lists for foreach operations."""
    for foreach_types in (device_slot.OPTIMIZED_TYPES, device_slot.CLIPPED_TYPES):
        foreach_types.append(
            lazy_tensor._CLASS
        )  # as torch's DTensor does: one operation for all parameters
    # `clip_grad_norm_` and its kin look up the C++ device.
    device_slot.FOREACH_DEVICES.wrap(lambda devices: lambda: [*devices(), "lazy"])


def _join_traced_types() -> None:
    """Let `make_fx`, and so `torch.func.linearize`, trace our tensors: else they are constants."""
    TRACED_TYPES.wrap(lambda types: (*types, lazy_tensor._CLASS))


# Factories that torch would otherwise build by resizing an empty tensor.
_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "kaiser_window",
    "kaiser_window.beta",
    "kaiser_window.periodic",
    "linspace",
    "logspace",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return uninitialized.fill(_zeros(size, dtype, device=device, memory_format=memory_format))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    naming.check_index(device)
    check_stride_count(size, stride)
    check_strides("empty_strided", stride)
    dtype = dtype or torch.get_default_dtype()
    return uninitialized.fill(_memory(Meta(tuple(size), tuple(stride), dtype)))


def _zeros(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    naming.check_index(device)
    dtype = dtype or torch.get_default_dtype()
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _memory(Meta.of(meta))


def _memory(meta: Meta) -> torch.Tensor:
    """Uninitialised memory: zeros, as one entry of the tape that XLA removes when overwritten."""
    aval = Aval.of(meta)
    recipe = _EMPTY.lookup(aval.token)
    if recipe is None:
        shape, dtype = aval.token
        new_recipe = Recipe(
            "empty", lambda _inputs, _scalars, _key: [jax.numpy.zeros(shape, dtype)], 1
        )
        recipe = _EMPTY.intern(aval.token, new_recipe)
    return lazy_tensor.fresh(aval, tapes.recorder().record(recipe, ())[0])


_EMPTY: Interned[Any, Recipe] = Interned(CALLS, "engine: recipes of empty tensors")


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    # torch calls this for data that it made from Python numbers: a constant, for a captured step.
    if isinstance(source, lazy_tensor.LazyTensor) or not isinstance(target, lazy_tensor.LazyTensor):
        return dispatch.handle(torch.ops.aten.copy_.default, (target, source), {})
    lazy_tensor.write(target, lazy_tensor.host_value(source.to(target.dtype)))
    return target


def _scalar(tensor: torch.Tensor):
    # torch.tensor([..]) reads each of its 0-d tensors so, below the class of tensors.
    return dispatch.handle(torch.ops.aten._local_scalar_dense.default, (tensor,), {})


def _factory(func: OpOverload) -> Any:
    """A factory as one entry of the tape."""
    handler = generator_argument.honour(func, dispatch.functional_handler(func))

    def make(*args: Any, **kwargs: Any) -> Any:
        naming.check_index(kwargs.get("device"))
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
        return handler(args, {k: v for k, v in kwargs.items() if v is not None} | {"device": _JAX})

    return make


_JAX = torch.device("meta")
