"""DLPack between torch and JAX: shared addresses, no copies, gradients, stream order.

On a GPU the tensors are CUDA tensors and the arrays are on the GPU; on the CPU both are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge

from .part import error_record

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8)
TOLERANCE = 1e-4
"""Relative to the largest value, in float32: the order of sums differs."""

ROUNDS = 10
"""Of the checks of stream order, since a race does not show every time."""


class MismatchError(Exception):
    """An address, a device or a value differs from the expected one."""


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Run all checks, also after a failure.

    Args:
        part: the section's only part.
        options: of the check; "device" is "cpu" or "gpu".
        save: receives for each check "ok", "copies" and "copied_bytes", and its own results.
    """
    # torch multiplies float32 in full precision by default, JAX on a GPU in TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    device = "cuda" if options["device"] == "gpu" else "cpu"
    results = {}
    for check in CHECKS:
        iso.metrics.reset()
        try:
            result: dict[str, Any] = {"ok": True, **check(device)}
        except Exception as error:
            result = {"ok": False, "error": error_record(error)}
        counters = iso.metrics.counters()
        result |= {name: counters[name] for name in ("copies", "copied_bytes")}
        result["ok"] &= not result["copies"]
        results[check.__name__] = result
        save(checks=results)


def torch_to_jax(device: str) -> dict[str, Any]:
    """`iso.to_jax` of a plain tensor shares its memory."""
    for dtype in DTYPES:
        tensor = torch.arange(100, device=device).to(dtype)
        array = iso.to_jax(tensor, copy=False)
        _expect(f"address, {dtype}", array.unsafe_buffer_pointer(), tensor.data_ptr())
        _expect("platform", array.device.platform, "gpu" if device == "cuda" else device)
        _expect("values", np.asarray(array, np.float32).tolist(), list(range(100)))
    return {"dtypes": len(DTYPES)}


def jax_to_torch(device: str) -> dict[str, Any]:
    """`iso.local_shards(.., framework="torch")` shares the memory of an array."""
    for dtype in DTYPES:
        array = jnp.arange(100).astype(str(dtype).removeprefix("torch."))
        tensor = _tensor(array)
        _expect(f"address, {dtype}", tensor.data_ptr(), array.unsafe_buffer_pointer())
        _expect("device", tensor.device.type, device)
        _expect("dtype", tensor.dtype, dtype)
        _expect("values", tensor.float().tolist(), list(range(100)))
    return {"dtypes": len(DTYPES)}


def jax_device(device: str) -> dict[str, Any]:
    """`iso.to_torch` and `iso.to_jax` return the same buffer."""
    array = jnp.ones((64, 64))
    tensor = iso.to_torch(array)
    _expect("device", tensor.device.type, "jax")
    result = iso.to_jax(tensor, copy=False)
    _expect("address", result.unsafe_buffer_pointer(), array.unsafe_buffer_pointer())
    return {}


def torch_function(device: str) -> dict[str, Any]:
    """`iso.torch_function` on plain tensors: the values and gradients of torch."""
    function = iso.torch_function(lambda x, weight: jnp.tanh(x @ weight))
    inputs, expected_inputs = _inputs(device), _inputs(device)
    result = function(*inputs)
    expected = torch.tanh(expected_inputs[0] @ expected_inputs[1])
    _expect("device", result.device.type, device)
    result.square().sum().backward()
    expected.square().sum().backward()
    errors = [_error(result, expected)]
    for tensor, other in zip(inputs, expected_inputs, strict=True):
        errors.append(_error(tensor.grad, other.grad))
    return {"largest_error": max(errors)}


def jax_function(device: str) -> dict[str, Any]:
    """`iso.jax_function` of a plain module: its memory, and the gradients of torch."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh()).to(device)
    x, _ = _inputs(device)
    module(x).square().sum().backward()
    function = iso.jax_function(module)
    params = function.params
    for name, parameter in module.named_parameters():
        _expect(f"address, {name}", params[name].unsafe_buffer_pointer(), parameter.data_ptr())
    array = iso.to_jax(x.detach(), copy=False)
    loss = jax.jit(lambda params, x: (function(params, x) ** 2).sum())
    grads = jax.grad(loss)(params, array)
    errors = [_error(_tensor(grads[name]), p.grad) for name, p in module.named_parameters()]
    return {"largest_error": max(errors)}


def jax_waits_for_torch(device: str) -> dict[str, Any]:
    """JAX reads a tensor that torch has not finished computing."""
    size = _size(device)
    for number in range(ROUNDS):
        tensor = torch.full((size, size), 1 / size, device=device)
        for _ in range(8):
            tensor = tensor @ tensor  # equal to its operand
        tensor += number
        array = iso.to_jax(tensor, copy=False)
        _error(array[-1, -1].item(), number + 1 / size)
    return {"rounds": ROUNDS}


def torch_waits_for_jax(device: str) -> dict[str, Any]:
    """torch reads an array that JAX has not finished computing."""
    size = _size(device)

    @jax.jit
    def compute(number: jax.Array) -> jax.Array:
        square = jnp.full((size, size), 1 / size) + 0 * number
        return jax.lax.fori_loop(0, 8, lambda _, x: x @ x, square) + number

    for number in range(ROUNDS):
        array = compute(jnp.float32(number))
        _error(_tensor(array)[-1, -1].item(), number + 1 / size)
    return {"rounds": ROUNDS}


CHECKS = (
    *(torch_to_jax, jax_to_torch, jax_device, torch_function, jax_function),
    *(jax_waits_for_torch, torch_waits_for_jax),
)


def _tensor(array: jax.Array) -> torch.Tensor:
    """The buffer of an array on one device, as a plain tensor."""
    [shard] = iso.local_shards(array, framework="torch")
    return shard.data


def _size(device: str) -> int:
    """The side of a square matrix whose products take long enough to show a race."""
    return 4096 if device == "cuda" else 256


def _inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()


def _expect(what: str, value: Any, expected: Any) -> None:
    if value != expected:
        raise MismatchError(f"{what}: got {value}, expected {expected}")


def _error(value: Any, expected: Any) -> float:
    """The largest error, relative to the largest expected value, or to 1 if that is larger.

    Raises:
        MismatchError: the error exceeds `TOLERANCE`.
    """
    value, expected = (torch.as_tensor(x).detach().cpu() for x in (value, expected))
    scale = max(expected.abs().max().item(), 1.0)
    error = (value - expected).abs().max().item() / scale
    if not error <= TOLERANCE:
        raise MismatchError(f"values are off by {error:.1e} of the largest, {scale:.1e}")
    return error
