"""The array of what a tensor views, for those who need it now.

One layer of a stacked parameter is `stack[number]`. Read on a tape, each number would be a program
of its own, and a checkpoint of 48 layers would compile hundreds. Here the number is an input:

>>> import torch, isoshard.torch_bridge
>>> stack = torch.arange(6.0).reshape(3, 2).to("jax")
>>> [array_of(part).tolist() for part in stack]
[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.blocks.block_layout import without_padding
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.exchange import from_numpy
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.deferred_checks import raise_failed
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values.value import donated_error


def constant(tensor: lazy_tensor.LazyTensor) -> torch.Tensor | None:
    """What a tensor of recorded code is whatever the inputs are; None if it depends on one."""
    here = recorder()
    if not isinstance(here, Tape):
        return None
    elements = here.constant_elements(lazy_tensor.read(tensor))
    return None if elements is None else from_numpy(elements.copy(), tensor._aval.meta.dtype)


def array_of(tensor: lazy_tensor.LazyTensor) -> jax.Array:
    """The placed array of a tensor on the `jax` device, computing it if need be."""
    array = _slice_of(tensor)
    return input_placement.array_of(lazy_tensor.read(tensor)) if array is None else array


def stored_array(tensor: lazy_tensor.LazyTensor) -> Any:
    """As `array_of`; of a tensor in blocks with padding the `UnevenArray`, and nothing moves."""
    array = _slice_of(tensor)
    return input_placement.stored_array(lazy_tensor.read(tensor)) if array is None else array


def to_host(tensor: lazy_tensor.LazyTensor) -> torch.Tensor:
    """Compute a tensor, gather it and copy it to the CPU."""
    recorder().refuse("the value of a tensor")
    array: Any = stored_array(tensor)
    uneven = array if isinstance(array, UnevenArray) else None
    array = array if uneven is None else uneven.array
    check_readable(array, tensor)
    if not array.is_fully_addressable and not _has_all_shards(array):
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} has shards in other processes, so that this "
            "one cannot read all of it; in every process, gather it first with "
            "isoshard.full(tensor) or tensor.full_tensor(), or read this process's shards: "
            "isoshard.local_shards(tensor)"
        )
    started = time.perf_counter()
    host = np.array(array, copy=True) if uneven is None else without_padding(uneven)
    seconds = time.perf_counter() - started
    raise_failed()
    metrics.record_transfer("device_to_host", host.nbytes, metrics.user_location(), seconds)
    if naming.is_torch_xla() and len(array.sharding.device_set) > 1:
        metrics.count("reads_of_shards")
    return from_numpy(host, tensor._aval.meta.dtype)


def _has_all_shards(array: jax.Array) -> bool:
    """Whether this process has every block of an array over several processes."""
    indices = {str(shard.index) for shard in array.addressable_shards}
    return (
        bool(indices)
        and len(indices) * math.prod(array.sharding.shard_shape(array.shape)) >= array.size
    )


def check_readable(array: Any, tensor: lazy_tensor.LazyTensor) -> None:
    """Refuse to read what JAX traces, or what was donated.

    Raises:
        ConcretizationTypeError: JAX's own, with the line of torch code.
        RuntimeError: the array was donated.
    """
    if isinstance(array, Tracer):
        raise jax.errors.ConcretizationTypeError(
            array,
            f"{metrics.user_location()}: torch code reads the value of a tensor of shape "
            f"{tuple(tensor.shape)} while JAX traces it, so there is none. For a branch on a "
            "tensor (`if x.sum() > 0`) write torch.where or torch.cond, for item() compute with "
            "the tensor itself; or call the function outside of jax.jit and jax.grad.",
        )
    if array.is_deleted():
        raise donated_error(tuple(array.shape))


def _slice_of(tensor: lazy_tensor.LazyTensor) -> jax.Array | None:
    """The array of what is one element of a computed array along an axis, and nothing else."""
    ops = tensor._chain.ops
    if len(ops) != 1 or ops[0][0] != "index" or is_tracing():
        return None
    array = input_placement.stored_array(visible(tensor._storage))
    if isinstance(array, Tracer | UnevenArray):
        return None
    _, axis, index = ops[0]
    with jax.enable_x64(True):  # a number may be beyond 32 bits
        return _slice(array, index, axis)


@functools.partial(jax.jit, static_argnames="axis")
def _slice(array: jax.Array, index: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)
