"""Exchange between host memory, JAX arrays and torch tensors, with explicit copies.

Every conversion takes `copy`: False shares memory or raises `CopyError`, True copies, None (the
default) shares where it can and copies where it must. Copies are counted in `metrics` ("copies",
"copied_bytes").

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> mesh = make_mesh((8,), ("x",))
>>> host = aligned_empty((8, 16), np.float32)
>>> host[:] = 1
>>> a = to_jax(host, named_sharding(("x", None), mesh, 2), copy=False)    # rows: 64 bytes each
>>> a.addressable_shards[3].data.unsafe_buffer_pointer() == host[3:].ctypes.data
True
>>> to_jax(host, named_sharding((None, "x"), mesh, 2), copy=False)
Traceback (most recent call last):
    ...
isoshard.core.errors.CopyError: array: cannot share memory under copy=False: the slice [0:8, 0:2] of device 0 is not contiguous (strides (64, 4) bytes). Pass copy=None or copy=True.

The rule: a CPU device shares its slice of host memory if the slice is C-contiguous and starts on a
64-byte boundary. Later writes to shared host memory show in the JAX array, which JAX assumes to be
immutable: do not write to it, or pass copy=True.

While `jax_enable_x64` is off, JAX stores 64-bit values in 32 bits, which is a copy, counted as
"narrowed". `to_jax` of NumPy arrays, numbers and lists of them rounds floats as `jnp.asarray` does;
integers that do not fit, which it would wrap, raise. Conversions to torch raise for 64-bit floats.
"""  # noqa: E501

from __future__ import annotations

from typing import Any, overload

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from isoshard.core.frameworks import framework_of, require
from isoshard.core.layout.in_shard_map import manual_axes, manual_sharding
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .array_like import (
    AnyArray,
    ArrayT,
    K,
    NumberT,
    from_literal,
    hidden_array,
    is_array,
    is_literal,
)
from .device_dtypes import check_narrowing as check_narrowing
from .device_dtypes import device_dtype as device_dtype
from .host_memory import ALIGNMENT as ALIGNMENT
from .host_memory import aligned_empty as aligned_empty
from .host_memory import check_host, check_narrowed, narrowed_to_jax
from .host_memory import host_to_jax as host_to_jax
from .reshard import reshard_array as reshard_array


@overload
def to_jax(
    x: AnyArray | list[NumberT],
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> jax.Array: ...
@overload
def to_jax(
    x: dict[K, ArrayT],
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> dict[K, jax.Array]: ...
@overload
def to_jax(
    x: list[ArrayT],
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> list[jax.Array]: ...
@overload
def to_jax(
    x: Any,
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> Any: ...
def to_jax(
    x: Any,
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> Any:
    """Convert to a `jax.Array` with the same values, sharing memory where possible.

    Example:
        >>> to_jax(np.arange(3)) + 1
        Array([1, 2, 3], dtype=int32)
        >>> to_jax({"rates": np.ones(2), "step": 3})
        {'rates': Array([1., 1.], dtype=float32), 'step': 3}

    Args:
        x: a NumPy array, a jax.Array, an array or module of a framework with a bridge, or a
            container of those, whose other leaves are returned unchanged. A number, or a list or
            tuple of only numbers, is an array, as for `jnp.asarray`. 64-bit values while
            `jax_enable_x64` is off: as for `shard`.
        sharding: the target sharding. By default that of `x`; a host array goes to JAX's default
            device.
        copy: None may share memory with `x` or copy, False shares or raises, True copies.
        reduce: of a DTensor, let torch reduce `Partial` placements first. Without it sums become
            unreduced axes, and other partial values raise.
        dtype: of a torch tensor's array. By default its own; a 64-bit one while `jax_enable_x64`
            is off becomes the 32-bit one, if every value is preserved. `"int64"` keeps all bits,
            of which JAX uses half unless it is set to use them.
        name: of the array, for messages.

    Returns:
        The jax.Array, or the container of them. Under a JAX transformation: a traced value,
        constrained to `sharding`.

    Raises:
        CopyError: memory cannot be shared under copy=False, or a value or dtype is not
            representable.
        TypeError: `x` is none of the above.
    """
    label = name or "array"
    if isinstance(x, jax.Array):
        return reshard_array(x, sharding, copy=copy, name=label)
    if isinstance(x, np.ndarray | np.generic):
        return narrowed_to_jax(np.asarray(x), sharding, copy=copy, name=label)
    framework = framework_of(x)
    if framework is not None:
        options = {"reduce": reduce or None, "dtype": dtype}  # most frameworks take neither
        options = {option: value for option, value in options.items() if value is not None}
        return framework.to_jax(x, sharding, copy=copy, name=label, **options)
    if is_literal(x):
        return to_jax(from_literal(x, copy, label), sharding, name=label)

    def convert(path: str, leaf: Any) -> Any:
        if not is_array(leaf) and framework_of(leaf) is None and not hidden_array(leaf):
            return leaf
        return to_jax(leaf, sharding, copy=copy, reduce=reduce, dtype=dtype, name=path)

    return _map_container(convert, x, "to_jax")


def to_torch(a: Any, *, copy: bool | None = None, device: Any = "jax") -> Any:
    """Convert to torch tensors with the same values.

    Args:
        a: a jax.Array on any number of devices, an UnevenArray, a NumPy array, or a container of
            those.
        copy: None may share memory or copy, False shares or raises, True copies. On the CPU None
            copies: torch could write to buffers that JAX assumes to be immutable.
        device: `"jax"`, or `"cpu"` for unsharded CPU tensors, such as the gradients that an
            optimizer of CPU parameters takes.

    Returns:
        Tensors with the sharding of `a`, on the torch device `jax`, or the container of them. For
        plain CPU tensors of each shard, see `local_shards(a, framework="torch")`.

    Raises:
        ImportError: torch is not installed.
        CopyError: memory cannot be shared under copy=False.
        TypeError: `a` is none of the above.
        ValueError: `device` is another one.

    Example:
        >>> to_torch({"w": jax.numpy.ones(2)}, device="cpu")
        {'w': tensor([1., 1.])}
    """
    torch = require("torch")
    kind = str(device).partition(":")[0]
    if kind not in ("jax", "xla", "cpu"):
        raise ValueError(f"to_torch gives tensors on 'jax' or on 'cpu', not on {device!r}")
    if isinstance(a, np.ndarray):
        with jax.enable_x64(kind == "cpu" or jax.config.jax_enable_x64):
            a = host_to_jax(a, None, copy=copy)
    if isinstance(a, jax.Array | UnevenArray):
        return torch.on_cpu(a, copy=copy) if kind == "cpu" else torch.from_jax(a, copy=copy)
    if torch.owns(a):
        if kind == "cpu":
            return torch.on_cpu(a, copy=copy)
        return torch.from_jax(torch.array(a, copy=copy)) if copy else a
    return _map_container(
        lambda path, leaf: to_torch(leaf, copy=copy, device=device), a, "to_torch"
    )


def check_shareable(
    x: np.ndarray | jax.Array, sharding: Sharding, *, copy: bool | None, name: str = "array"
) -> None:
    """Raise what `to_jax` would raise for an array, and do nothing else."""
    if manual_axes():
        manual_sharding(x, sharding, name)
    elif isinstance(x, np.ndarray):
        if not check_narrowed(x, copy, name):
            check_host(x, sharding, copy=copy, name=name)
    elif copy is False and not isinstance(x, Tracer):
        reshard_array(x, sharding, copy=False, name=name)


def _map_container(convert: Any, tree: Any, verb: str) -> Any:
    if jax.tree.all(jax.tree.map(lambda leaf: leaf is tree, tree)) and jax.tree.leaves(tree):
        raise TypeError(
            f"{verb} takes a NumPy array, a jax.Array, a tensor or module of a framework with a "
            f"bridge, or a container of those, not {type(tree).__name__}"
        )
    return jax.tree.map_with_path(
        lambda path, leaf: convert(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )
