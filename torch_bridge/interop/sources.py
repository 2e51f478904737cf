"""Sources of a torch module that JAX computes: named arrays, and a pure function of them.

A *source* splits an NNX module, a Linen module with its variables, or a function with a pytree.
This module does not import Flax: a caller with a Flax object has imported it.

>>> import jax.numpy as jnp
>>> source = Tree(lambda w, x: x @ w["dense"]["kernel"], {"dense": {"kernel": jnp.ones((2, 3))}})
>>> list(source.parameters), list(source.buffers)
(['dense.kernel'], [])
>>> source.apply(source.parameters, {}, (jnp.ones((1, 2)),), {}, training=True)
(Array([[2., 2., 2.]], dtype=float32), {})

PRNG keys, which torch cannot hold, are buffers of their bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.runtime._jax_internals.undocumented import key_impl
from isoshard.core.transfer.exchange import to_jax
from isoshard.torch_bridge.common.argument_types import FlaxObject, PyTree

Arrays = dict[str, jax.Array]
_TRAINING = ("train", "training", "is_training")
_NOT_TRAINING = ("deterministic", "use_running_average")


class Tree:
    """A pytree and a function `apply(tree, *args, **kwargs)`.

    Floating arrays are parameters, other arrays are buffers, and other leaves are constants.

    Args:
        apply: pure.
        tree: of arrays.

    Attributes:
        name: for messages and reports.
        parameters: arrays by name, paths joined by dots.
        buffers: likewise; PRNG keys as their bits.
    """

    parameter_prefix = ""

    def __init__(self, apply: Callable[..., Any], tree: PyTree):
        """See the class."""
        self.name = getattr(apply, "__name__", None) or type(apply).__name__
        self._apply = apply
        self._take(tree)

    def _take(self, tree: Any) -> None:
        pairs, self._structure = jax.tree.flatten_with_path(tree)
        self._fixed: list[Any] = []
        self._names: list[str | None] = []
        self._keys: dict[str, str] = {}
        self.parameters: Arrays = {}
        self.buffers: Arrays = {}
        for path, leaf in pairs:
            is_array = isinstance(leaf, jax.Array | np.ndarray)
            name = path_name(path).removeprefix(self.parameter_prefix) or "value"
            self._names.append(name if is_array else None)
            self._fixed.append(None if is_array else leaf)
            if is_array:
                self._add(name, leaf, self._is_parameter(path, leaf))

    def _is_parameter(self, path: Any, leaf: Any) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    def _add(self, name: str, array: Any, is_parameter: bool) -> None:
        if name in self.parameters or name in self.buffers:
            raise ValueError(f"{self.name} has two arrays called {name}; rename one")
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            self._keys[name] = str(key_impl(array))
            array = jax.random.key_data(array)
        (self.parameters if is_parameter else self.buffers)[name] = to_jax(array, name=name)

    def joined(self, arrays: Arrays) -> Any:
        """The tree with other arrays, parameters and buffers by name."""
        leaves = [
            fixed if name is None else self._typed(name, arrays[name])
            for name, fixed in zip(self._names, self._fixed, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def _typed(self, name: str, array: jax.Array) -> jax.Array:
        return (
            jax.random.wrap_key_data(array, impl=self._keys[name]) if self._is_key(name) else array
        )

    def _is_key(self, name: str) -> bool:
        return name in self._keys

    def apply(
        self, parameters: Arrays, buffers: Arrays, args: PyTree, kwargs: PyTree, *, training: bool
    ) -> tuple[Any, Arrays]:
        """Call the function; returns its result, and the buffers that have changed."""
        return self._apply(self.joined({**parameters, **buffers}), *args, **kwargs), {}

    def __deepcopy__(self, memo: Any) -> Any:
        """Itself: it never changes."""
        return self


class Linen(Tree):
    """A Linen module with its variables.

    Parameters go by their names in the collection "params", other variables by collection and
    name. `rngs` become buffers: a key and a counter for each, so that each call draws new numbers.

    Args:
        module: a `flax.linen.Module`.
        variables: its collections.
        rngs: a PRNG key for dropout, or keys by name.
    """

    parameter_prefix = "params."

    def __init__(self, module: FlaxObject, variables: FlaxObject, rngs: FlaxObject = None):
        """See the class."""
        self.name = type(module).__name__
        self._module = module
        self._signature = inspect.signature(type(module).__call__)
        self._collections = [name for name in variables if name != "params"]
        self._take(variables)
        named = rngs if isinstance(rngs, Mapping) else {"dropout": rngs} if rngs is not None else {}
        self._streams = list(named)
        for stream, key in named.items():
            self._add(f"rngs.{stream}.key", key, False)
            self._add(f"rngs.{stream}.count", jnp.zeros((), jnp.uint32), False)

    def _is_parameter(self, path: Any, leaf: Any) -> bool:
        return path_name(path[:1]) == "params" and super()._is_parameter(path, leaf)

    def apply(
        self, parameters: Arrays, buffers: Arrays, args: PyTree, kwargs: PyTree, *, training: bool
    ) -> tuple[Any, Arrays]:
        """As `Tree.apply`; `train` and its like follow the torch module's mode."""
        kwargs = {**self._mode(args, kwargs, training), **kwargs}
        changed: Arrays = {}
        if self._streams:
            kwargs["rngs"] = {stream: self._draw(stream, buffers) for stream in self._streams}
            for stream in self._streams:
                changed[f"rngs.{stream}.count"] = buffers[f"rngs.{stream}.count"] + 1
        result, updated = self._module.apply(
            self.joined({**parameters, **buffers}), *args, mutable=self._collections, **kwargs
        )
        for path, leaf in jax.tree.leaves_with_path(updated):
            name = path_name(path)
            if name not in buffers:
                raise ValueError(f"{self.name} created the variable {name} in a call; {_FIXED}")
            if leaf is not buffers[name]:
                changed[name] = leaf
        return result, changed

    def _draw(self, stream: str, buffers: Arrays) -> jax.Array:
        name = f"rngs.{stream}"
        return jax.random.fold_in(
            self._typed(f"{name}.key", buffers[f"{name}.key"]), buffers[f"{name}.count"]
        )

    def _mode(self, args: Any, kwargs: Any, training: bool) -> dict[str, bool]:
        arguments = self._signature.bind_partial(self._module, *args, **kwargs).arguments
        modes = {**dict.fromkeys(_TRAINING, training), **dict.fromkeys(_NOT_TRAINING, not training)}
        return {
            name: mode
            for name, mode in modes.items()
            if name in self._signature.parameters and name not in arguments
        }


class Nnx(Tree):
    """An NNX module: `nnx.Param`s are parameters, all other variables are buffers.

    Args:
        model: an `nnx.Module`; it stays as it is.
    """

    def __init__(self, model: FlaxObject):
        """See the class."""
        self._nnx: Any = sys.modules["flax.nnx"]
        self.name = type(model).__name__
        self._graph, state = self._nnx.split(model)
        self._kinds = {path_name(path): box for path, box in self._boxes(state)}
        self._take(state)

    def _boxes(self, state: Any) -> list[tuple[Any, Any]]:
        is_variable = lambda node: isinstance(node, self._nnx.Variable)  # noqa: E731
        return jax.tree.leaves_with_path(state, is_leaf=is_variable)

    def _is_parameter(self, path: Any, leaf: Any) -> bool:
        box = self._kinds[path_name(path)]
        return isinstance(box, self._nnx.Param) and super()._is_parameter(path, leaf)

    def joined(self, arrays: Arrays) -> Any:
        """A new model around arrays."""
        return self._nnx.merge(self._graph, super().joined(arrays))

    def apply(
        self, parameters: Arrays, buffers: Arrays, args: PyTree, kwargs: PyTree, *, training: bool
    ) -> tuple[Any, Arrays]:
        """As `Tree.apply`, with `model.train()` or `model.eval()` as the torch module's mode."""
        model = self.joined({**parameters, **buffers})
        model.train() if training else model.eval()
        before = self._arrays(model)
        result = model(*args, **kwargs)
        after = self._arrays(model)
        changed, errors = {}, []
        for name, leaf in after.items():
            if name not in before:
                errors.append(f"created the variable {name}")
            elif leaf is not before[name] and name in parameters:
                errors.append(f"changed the parameter {name}")
            elif leaf is not before[name]:
                changed[name] = jax.random.key_data(leaf) if self._is_key(name) else leaf
        errors += [f"dropped the variable {name}" for name in before if name not in after]
        if errors:
            raise ValueError(f"{self.name} {', '.join(errors)} in a call; {_FIXED}")
        return result, changed

    def _arrays(self, model: Any) -> Arrays:
        """Its arrays by name, without intermediates (`sow`), which are of one call."""
        return {
            path_name(path + rest): leaf
            for path, box in self._boxes(self._nnx.split(model)[1])
            if not isinstance(box, self._nnx.Intermediate)
            for rest, leaf in jax.tree.leaves_with_path(box)
        }


_FIXED = (
    "a torch module has a fixed set of tensors: create all variables before torch_module, and "
    "change only those that are not parameters"
)


def source_of(model: FlaxObject, variables: FlaxObject, init: FlaxObject, rngs: FlaxObject) -> Tree:
    """The source of the arguments of `torch_module`.

    Raises:
        TypeError: the arguments do not go together.
    """
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    kind = type(model).__name__
    if nnx is not None and isinstance(model, nnx.Module):
        if variables is not None or init is not None or rngs is not None:
            raise TypeError(
                f"{kind} is an NNX module, which holds its variables and rngs itself; call "
                "torch_module(model)"
            )
        return Nnx(model)
    is_linen = linen is not None and isinstance(model, linen.Module)
    start: Any = model.init if is_linen else None
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        start, model = model
    if (variables is None) == (init is None) or (init is not None and start is None):
        raise TypeError(
            f"torch_module of {kind} needs its variables: torch_module(model, variables) or, of a "
            "Linen module or a pair (init, apply), torch_module(model, init=(key, example, ..))"
        )
    if init is not None:
        variables = start(*init)
    if is_linen:
        return Linen(model, variables, rngs)
    if not callable(model):
        raise TypeError(
            "torch_module takes an NNX or Linen module, a pair (init, apply), or a function "
            f"apply(tree, ..), not {kind}"
        )
    if rngs is not None:
        raise TypeError("rngs are for Linen modules; give a function its keys as arguments")
    return Tree(model, variables)
