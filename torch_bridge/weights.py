"""Weights of torch modules: modules filled with arrays, and called on arrays.

>>> import jax.numpy as jnp
>>> model = torch.nn.Linear(2, 3, device="meta")         # no memory yet
>>> load_weights(model, {"weight": jnp.ones((3, 2)), "bias": jnp.zeros(3)})
>>> model.weight.device
device(type='jax', index=0)
>>> on_arrays(model)(jnp.ones((1, 2))).tolist()
[[2.0, 2.0, 2.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.transfer.exchange import to_jax
from isoshard.core.weights.weight_errors import WeightError, raise_listed
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.module_fields import own_buffers, own_parameters

from .common.dtypes import physical_dtype
from .common.exchange import to_numpy
from .framework.framework import Torch
from .layout.widths import jax_dtype
from .modules.initial_buffers import initial_buffers
from .overrides import swap_parameters


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Give a module new weights, without copying them.

    Every parameter and persistent buffer becomes a tensor on the device `jax` with the layout of
    its array, also in a module on `meta`; other buffers move there. A buffer on `meta` that is in
    no file (one that is not persistent, such as the `inv_freq` of a rotary embedding) gets the
    elements that the module's own initializer gives it: `_init_weights` as in `transformers`,
    `reset_parameters`, or `init_weights`. Parameters remain the same objects where possible, and
    tied ones remain tied. All weights are checked before any change.

    Args:
        module: changed in place.
        weights: JAX or NumPy arrays by the names of `state_dict`; a tied weight by any of its names
            (by several, if they are one array). Buffers that are not persistent may be among them.

    Raises:
        WeightError: listing each weight that is missing, not of the module, or has another shape or
            dtype, and each other buffer on `meta` that no initializer computes.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> load_weights(model, {"weight": jax.numpy.ones((1, 2)), "bias": np.zeros(1, np.float32)})
        >>> model(torch.ones(1, 2, device="jax")).item()
        2.0
    """
    slots = _slots(module)
    tensors = {name: tensor for name, (_, _, tensor) in slots.items()}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    persistent = set(module.state_dict(keep_vars=True))
    errors = [
        f"{name} {tuple(array.shape)}: {type(module).__name__} has no such weight"
        for name, array in weights.items()
        if name not in tensors
    ]
    on_meta: list[str] = []
    chosen: dict[int, Any] = {}
    for key, called in names.items():
        passed = {id(weights[name]): name for name in called if name in weights}
        tensor = tensors[called[0]]
        if len(passed) > 1:
            errors.append(
                f"{', '.join(passed.values())}: are one weight, and several arrays were passed"
            )
        elif passed:
            [name] = passed.values()
            chosen[key] = weights[name]
            errors += _mismatches(name, tensor, weights[name])
        elif persistent & {*called}:
            errors.append(f"{called[0]} {tuple(tensor.shape)}: is missing")
        elif tensor.device.type == "meta":
            on_meta.append(called[0])
    computed: dict[str, torch.Tensor] = {}
    if on_meta:
        computed, reasons = initial_buffers(module, on_meta)
        errors += [
            f"{name} {tuple(tensors[name].shape)}: is on meta and in no state dict, and {reason}; "
            "compute it in reset_parameters() of its module, pass it among the weights, or "
            'construct its module outside torch.device("meta")'
            for name, reason in reasons.items()
        ]
    raise_listed(f"the weights do not fit {type(module).__name__}", errors)
    moved = {key: _tensor(array, tensors[names[key][0]]) for key, array in chosen.items()}
    moved |= {id(tensors[name]): buffer.to("jax") for name, buffer in computed.items()}
    moved_slots = [slot for slot in swap_parameters.parameters(module) if id(slot[2]) in moved]
    swap_parameters.replace([(slot, moved[id(slot[2])]) for slot in moved_slots])
    for table, key, tensor in slots.values():
        if not isinstance(tensor, torch.nn.Parameter):
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to("jax")
            table[key] = moved[id(tensor)]


def on_arrays(module: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """Make a function of arrays that calls a torch module, for `isoshard.weights.verify`.

    Args:
        module: a module or function of tensors.
        **fixed: arguments passed as they are, e.g. `use_cache=False`.

    Returns:
        A function of NumPy or JAX arrays, which go where the module's parameters are. Its result is
        what the module returns with NumPy arrays for tensors; of an output object of
        `transformers`, the logits (or the last hidden state) alone.

    Example:
        >>> on_arrays(torch.nn.functional.relu)(np.float32([-1.0, 2.0]))
        array([0., 2.], dtype=float32)
    """

    def call(*arrays: Any) -> Any:
        device = _device(module)
        with torch.no_grad():
            inputs = [torch.from_numpy(np.array(array)).to(device) for array in arrays]
            result = module(*inputs, **fixed)
            for name in ("logits", "last_hidden_state"):
                if hasattr(result, name):
                    result = getattr(result, name)
            return pytree.tree_map_only(torch.Tensor, _to_numpy, result)

    return call


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor in its own dtype, which for JAX's arrays may be too wide."""
    return to_numpy(tensor.detach().cpu())


def _device(module: Any) -> torch.device:
    if isinstance(module, torch.nn.Module):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")


def _slots(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str, torch.Tensor]]:
    """The table and key of every parameter and buffer, with the tensor, by each of its names."""
    return {
        f"{path}.{key}" if path else key: (holder, key, tensor)
        for path, child in module.named_modules(remove_duplicate=False)
        for holder in (own_parameters(child), own_buffers(child))
        for key, tensor in holder.items()
        if tensor is not None
    }


def _mismatches(name: str, tensor: torch.Tensor, array: Any) -> list[str]:
    errors = []
    if tuple(array.shape) != tuple(tensor.shape):
        errors.append(f"{name}: shape {tuple(array.shape)}, wanted {tuple(tensor.shape)}")
    want = physical_dtype(tensor.dtype)
    if array.dtype not in (want, jax_dtype(want)):
        errors.append(
            f"{name}: dtype {array.dtype}, wanted {want}; convert the module or the array"
        )
    return errors


def _tensor(array: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor over an array, a parameter where `like` is one."""
    if not isinstance(array, jax.Array | np.ndarray):
        raise WeightError(f"weights are JAX or NumPy arrays, not {type(array).__name__}")
    tensor = Torch().from_jax(to_jax(array)).to(like.dtype)
    if isinstance(like, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor
