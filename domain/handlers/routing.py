"""Routing: a function, and a handler that does its work where arrays are split over devices.

>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> def handler(shards, a, b):                   # runs on every device, with its blocks
...     return shards.all_reduce(jnp.dot(a, b), shards.axes(a, 0)), P()
>>> dot = register_function_handler(jnp.dot, handler)
>>> x = np.arange(8, dtype=np.float32)
>>> a = shard(x, make_mesh((4,), ("x",)), ("x",))
>>> dot(a, a)                                    # by the handler
Array(140., dtype=float32)
>>> dot(x, x)                                    # nothing is split: by jnp.dot itself
Array(140., dtype=float32)

JAX itself is not changed: `dot` is routed, `jnp.dot` is not.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax

from isoshard.core.kit import ShardingError, any_mesh, as_mesh, record_shardings, recording

from .calling import Handled, Handler, call
from .handler_arguments import Arguments, read
from .lifted import in_lift

_PLAIN = contextvars.ContextVar(
    "functions are called for the shapes of their results", default=False
)
_NOT_SPLIT: Any = object()  # no array of a call is split


class Routed:
    """A function with a handler; returned by `register_function_handler`.

    Attributes:
        function: what it does on global arrays.
        handler: what it does on blocks.
    """

    def __init__(
        self, function: Callable[..., Any], handler: Handler, *, check: bool, prove: bool
    ) -> None:
        """See `register_function_handler`."""
        functools.update_wrapper(self, function, updated=())
        self.function, self.handler = function, handler
        self._name = getattr(function, "__name__", type(function).__name__)
        expected = functools.partial(_expected, function, self._name) if check else None
        handled = Handled(self._name, handler, expected, prove)

        def run(arguments: Arguments, arrays: list[Any]) -> Any:
            return call(handled, arguments, arrays)

        compiled = jax.jit(run, static_argnums=0)

        @any_mesh
        def by_handler(mesh: Any, specs: Any, args: Any, kwargs: Any) -> Any:
            arguments, arrays = read(args, kwargs, mesh, specs, self._name)
            return record_shardings(compiled(arguments, arrays)) if arguments.split else _NOT_SPLIT

        self._by_handler = by_handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler if an array is split, else the function.

        Args:
            *args: those of the function; arrays may be `jax.Array`s, NumPy arrays and
                `UnevenArray`s, and trees of them. The rest is constant, and hashable.
            **kwargs: likewise.

        Returns:
            The function's results: `UnevenArray`s where the handler returns sizes.

        Raises:
            ShardingError: the arrays are on different meshes, `jax.jit` traces one and its sharding
                is not declared, or the handler's results do not fit.
            TypeError: an argument is neither an array nor hashable.
        """
        return self._call(None, None, args, kwargs)

    def over(self, mesh: Any, *specs: Any, **named: Any) -> Callable[..., Any]:
        """The function for arrays whose shardings `jax.jit` and `iso.domain.lift` hide.

        Args:
            mesh: of the arrays.
            *specs: for each argument the spec of its arrays, in any spelling, or None for what is
                replicated or no array.
            **named: likewise for arguments given by keyword.

        Returns:
            A function of the same arguments. A traced array is resharded to the declared spec;
            an array that has another sharding raises.

        Raises:
            ShardingError, TypeError: as the function itself, when called.

        Example:
            >>> import jax.numpy as jnp
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> mesh = make_mesh((4,), ("x",))
            >>> def handler(shards, a, b):
            ...     return shards.all_reduce(a @ b, "x"), ()
            >>> dot = register_function_handler(jnp.dot, handler)
            >>> jax.jit(lambda a: dot.over(mesh, ("x",), ("x",))(a, a + 1))(jnp.arange(8.0))
            Array(168., dtype=float32)
        """

        @functools.wraps(self.function)
        def with_specs(*args: Any, **kwargs: Any) -> Any:
            return self._call(mesh, (specs, named), args, kwargs)

        return with_specs

    def _call(self, mesh: Any, specs: Any, args: Any, kwargs: Any) -> Any:
        inside = jax.sharding.get_abstract_mesh().manual_axes  # a handler, or `jax.shard_map`
        if inside or _PLAIN.get():
            return self.function(*args, **kwargs)
        if mesh is not None and recording():

            def call(*args: Any, **kwargs: Any) -> Any:
                return self._on_devices(mesh, specs, args, kwargs)

            return in_lift(call, self.function, as_mesh(mesh), specs, args, kwargs)
        return self._on_devices(mesh, specs, args, kwargs)

    def _on_devices(self, mesh: Any, specs: Any, args: Any, kwargs: Any) -> Any:
        results = self._by_handler(mesh, specs, args, kwargs)
        return self.function(*args, **kwargs) if results is _NOT_SPLIT else results


def register_function_handler(
    function: Callable[..., Any], handler: Handler, *, check: bool = True, prove: bool = True
) -> Routed:
    """Define what a function does where its arrays are split over devices.

    Args:
        function: of arrays, `jnp.dot` or your own; traceable by `jax.jit`.
        handler: `handler(shards, *args, **kwargs)`, with this device's block for each array, under
            `jax.shard_map` over the full mesh. `shards` (`Shards`) has their shardings, and the
            verbs to communicate. It returns `(local, spec)`, or a tuple of local arrays and a tuple
            of specs; `shards.like` and `shards.uneven` give valid sizes as well.
        check: compare the shapes and dtypes of its results with those that `function` gives at the
            true shapes, for which that is traced, and never run.
        prove: let JAX prove that what a spec calls unsplit along a mesh axis is the same on its
            devices. Turn it off where JAX cannot prove it, such as after an `all_gather`.

    Returns:
        The routed function. Keep it: it caches its compiled programs. It can be differentiated,
        as far as the handler can, and be called inside `jax.jit`, see `Routed.over`; inside a
        handler or `jax.shard_map` it is `function`.

    Raises:
        TypeError: `function` or `handler` cannot be called.

    Example:
        >>> import jax.numpy as jnp
        >>> from isoshard.core.transfer.device_put import shard
        >>> def handler(shards, x):                     # each block alone, laid out as it was
        ...     return jnp.square(x), shards.like(x, 0)
        >>> square = register_function_handler(jnp.square, handler)
        >>> square(shard(jnp.arange(4.0), jax.make_mesh((4,), ("x",)), ("x",))).sharding.spec
        P('x',)
    """
    for role, value in (("function", function), ("handler", handler)):
        if not callable(value):
            raise TypeError(
                f"register_function_handler takes a function and its handler, and the {role} given "
                f"is a {type(value).__name__}"
            )
    return Routed(function, handler, check=check, prove=prove)


def _expected(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """The shapes of the function's own results."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    shaped = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def flat(*arrays: Any) -> Any:
        rest = iter(arrays)
        filled = [
            next(rest) if is_shape else leaf for is_shape, leaf in zip(shaped, leaves, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return function(*args, **kwargs)

    before = _PLAIN.set(True)
    try:
        return jax.eval_shape(flat, *itertools.compress(leaves, shaped))
    except jax.errors.JAXTypeError as error:
        raise ShardingError(
            f"{name} cannot be traced to find out the shapes of its results "
            f"({str(error).splitlines()[0]}); register its handler with check=False"
        ) from error
    finally:
        _PLAIN.reset(before)
