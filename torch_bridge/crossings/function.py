"""A torch module or function as a pure JAX function.

The same lowerings that record on the tape run at once when the values are JAX tracers, so torch
code can be called under `jax.jit`, `jax.grad` and `jax.vmap`:

>>> import torch, isoshard as iso
>>> model = torch.nn.Linear(3, 2)
>>> f = iso.jax_function(model)
>>> sorted(f.params)
['bias', 'weight']
>>> x = jax.numpy.ones((4, 3))
>>> jax.jit(f)(f.params, x).shape
(4, 2)
>>> gradients = jax.grad(lambda params: f(params, x).sum())(f.params)
>>> gradients["bias"].tolist()
[4.0, 4.0]

In-place writes stay inside: a module's buffers (BatchNorm statistics) are read from `params` and
their new values are dropped; call `.eval()` first if that is not meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from isoshard.core.exchange import to_jax
from isoshard.torch_bridge import modules
from isoshard.torch_bridge.dtypes import logical_dtype
from isoshard.torch_bridge.engine import base
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.engine.value import Aval, Value
from isoshard.torch_bridge.framework import Torch


class JaxFunction:
    """A pure JAX function of `(params, *args, rng=None, **kwargs)`.

    Attributes:
        params: the module's parameters and buffers by name, as JAX arrays that share the module's
            buffers; empty for a plain function.
    """

    def __init__(self, target: Callable[..., Any]):
        """See `jax_function`."""
        self._target = target

    @property
    def params(self) -> dict[str, jax.Array]:
        """The present values, without a copy where they are on the `jax` device."""
        module = self._target
        if not isinstance(module, torch.nn.Module):
            return {}
        framework = Torch()
        return {
            name: framework.to_jax(tensor, name=name) for name, tensor in modules.tensors(module)
        }

    def __call__(self, params: Any, *args: Any, rng: jax.Array | None = None, **kwargs: Any) -> Any:
        """Run the torch code on JAX values.

        Args:
            params: a dictionary like `.params` (other names are refused); for a plain function its
                first argument.
            *args: JAX arrays, tensors, or anything the torch code takes.
            rng: a JAX PRNG key, needed if the code draws random numbers (dropout in training).
            **kwargs: likewise.

        Returns:
            The result, with JAX arrays for tensors.
        """
        if not isinstance(self._target, torch.nn.Module):
            args = (params, *args)
        with tapes.immediately(_keys(rng)), torch.no_grad():
            leaves, structure = jax.tree.flatten((args, kwargs))
            args, kwargs = jax.tree.unflatten(structure, [_wrap(leaf) for leaf in leaves])
            if isinstance(self._target, torch.nn.Module):
                result = _call_module(self._target, params, args, kwargs)
            else:
                result = self._target(*args, **kwargs)
            return pytree.tree_map(_unwrap, result)


def jax_function(target: torch.nn.Module | Callable[..., Any]) -> JaxFunction:
    """Make a pure JAX function of a torch module or function.

    Args:
        target: an `nn.Module`, called as `f(params, *args)`; or a function of tensors, called as
            `f(*args)`.

    Returns:
        A callable that works under `jax.jit`, `jax.grad`, `jax.vmap` and their compositions.
    """
    if not callable(target):
        raise TypeError(f"jax_function takes a module or a function, not {type(target).__name__}")
    return JaxFunction(target)


def _call_module(
    module: torch.nn.Module, params: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    own = dict(modules.tensors(module))
    unknown, missing = set(params) - set(own), set(own) - set(params)
    if unknown or missing:
        raise KeyError(
            f"params of {type(module).__name__} must have the names of jax_function(module)"
            f".params; unknown are {sorted(unknown)}, missing are {sorted(missing)}"
        )
    wrapped = {name: _wrap(value, own[name].dtype) for name, value in params.items()}
    return torch.func.functional_call(module, wrapped, args, kwargs)


def _wrap(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    if isinstance(leaf, base.LazyTensor):
        return leaf
    if isinstance(leaf, torch.Tensor):
        leaf = Torch().to_jax(leaf.detach())
    if isinstance(leaf, np.ndarray):
        leaf = to_jax(leaf)
    if not isinstance(leaf, jax.Array):
        return leaf
    aval = Aval.contiguous(tuple(leaf.shape), dtype or logical_dtype(leaf.dtype))
    return base.fresh(aval, Value(leaf))


def _unwrap(leaf: Any) -> Any:
    return base.read(leaf).array if isinstance(leaf, base.LazyTensor) else leaf


def _keys(rng: jax.Array | None) -> Any:
    if rng is None:
        return None

    def draw():
        key = rng
        while True:
            key, this = jax.random.split(key)
            yield this

    return draw()
