"""A torch module or function as a pure JAX function.

The same lowerings that record on the tape run at once when the values are JAX tracers, so torch
code can be called under `jax.jit`, `grad`, `vmap`, `scan`, `checkpoint`, `shard_map` and their
compositions:

>>> import torch, isoshard as iso
>>> model = torch.nn.Linear(3, 2)
>>> f = iso.jax_function(model)
>>> sorted(f.params)
['bias', 'weight']
>>> x = jax.numpy.ones((4, 3))
>>> jax.jit(f)(f.params, x).shape
(4, 2)
>>> gradients = jax.jit(jax.grad(lambda params: f(params, x).sum()))(f.params)
>>> gradients["bias"].tolist()
[4.0, 4.0]

In-place writes stay inside. A module's new buffers (the statistics of BatchNorm) are dropped by
`f(params, ..)`, and returned by `f.with_buffers`, which takes parameters and buffers separately:

>>> f = iso.jax_function(torch.nn.BatchNorm1d(3))
>>> y, buffers = f.with_buffers(f.parameters, f.buffers, x)
>>> buffers["running_mean"].tolist(), buffers["num_batches_tracked"].item()
([0.10000000149011612, 0.10000000149011612, 0.10000000149011612], 1)

Whether a module trains is read when it is called: under `jax.jit`, when the function is traced.
Tensors that are no buffers, such as `torch.arange(n)` made on the CPU, are constants. Derivatives
are torch's: `detach`, `no_grad`, hooks and `torch.autograd.Function`s have their effect.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import torch

from isoshard.core.layout.spec import SpecLike
from isoshard.core.layout.uneven import is_uneven
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import PyTree
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.common.wrapper_tensors import expanded
from isoshard.torch_bridge.engine.capture.assemble import Repeat, checked_repeat
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.layout.widths import jax_dtype
from isoshard.torch_bridge.modules import modules

from . import module_tensors
from .convert import constant, keys
from .recorded_function import Take, eager_take, no_cpu_draws, recorded
from .result_types import Result, ShardingById, call_under_auto, declared_layouts, like_argument
from .users_mesh import users_mesh

_LEFT_OUT: Any = object()


class JaxFunction:
    """A pure JAX function of `(params, *args, rng=None, **kwargs)`.

    Args:
        target: as for `jax_function`.
        out_sharding: likewise.
        repeat: likewise.

    Attributes:
        params: the module's parameters and buffers by name, as JAX arrays that share the module's
            buffers; empty for a plain function. Of a tensor that is made of others, such as a
            quantized weight, those: `weight.qdata`, `weight.scale`.

    Example:
        >>> f = jax_function(torch.nn.Linear(3, 2))
        >>> {name: array.shape for name, array in f.params.items()}
        {'weight': (2, 3), 'bias': (2,)}
        >>> f(f.params, jax.numpy.ones((4, 3))).shape
        (4, 2)
    """

    def __init__(
        self, target: Callable[..., Any], out_sharding: SpecLike = None, repeat: Repeat = None
    ):
        """See `jax_function`."""
        self.__wrapped__, self._out_sharding = target, out_sharding
        self._repeat: Repeat = checked_repeat(repeat)

    @property
    def params(self) -> dict[str, jax.Array]:
        """The present values, without a copy where they are on the `jax` device.

        Raises:
            ValueError: some are on the `meta` device.
        """
        return {**self.parameters, **self.buffers}

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The parameters alone; a tied one once, under its first name."""
        return self._arrays(self._named("named_parameters"))

    @property
    def buffers(self) -> dict[str, jax.Array]:
        """The buffers alone."""
        return self._arrays(self._named("named_buffers"))

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every entry of `params`, which a module on `meta` has as well.

        >>> jax_function(torch.nn.Linear(3, 2, device="meta")).shapes["weight"]
        ShapeDtypeStruct(shape=(2, 3), dtype=float32)
        """
        tensors = [*self._named("named_parameters"), *self._named("named_buffers")]
        return {
            name: jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(physical_dtype(tensor.dtype)))
            for name, tensor in tensors
        }

    def __call__(
        self, params: PyTree = _LEFT_OUT, /, *args: Any, rng: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        """Run the torch code on JAX values.

        Args:
            params: a dictionary like `.params` (other names are an error); for a plain function its
                first argument, if it has any.
            *args: JAX arrays, tensors, or anything the torch code takes.
            rng: a JAX PRNG key, needed if the code draws random numbers (dropout in training).
            **kwargs: likewise.

        Returns:
            The result, with JAX arrays for tensors.

        Raises:
            KeyError: `params` has other names than the module.
            ValueError: it has other shapes or dtypes.
            RuntimeError: random numbers are drawn, and there is no `rng`.
            TypeError: the function of a module is called without `params`, or `rng` is given and
                is an argument of the torch code, too.
        """
        self._check_rng(rng)
        if isinstance(self.__wrapped__, torch.nn.Module):
            if params is _LEFT_OUT and not self._has_argument("params"):
                params = kwargs.pop("params", _LEFT_OUT)
            if params is _LEFT_OUT:
                raise TypeError(
                    f"the function of {self._name} takes the module's arrays first: f(f.params, x)"
                )
            tensors = expanded(modules.tensors(self.__wrapped__))
            _check(params, tensors, f"params of {self._name}", "params")
            module_tensors.check(params, tensors, f"params of {self._name}")
            return self._cross(self._of_module, (params, args, kwargs), rng)
        arguments = args if params is _LEFT_OUT else (params, *args)
        return self._cross(self._of_function, (arguments, kwargs), rng)

    def with_buffers(
        self,
        params: PyTree,
        buffers: PyTree,
        /,
        *args: Any,
        rng: jax.Array | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Run the module, and return its new buffers, too.

        Args:
            params: a dictionary like `.parameters`.
            buffers: a dictionary like `.buffers`.
            *args: as for a call.
            rng: likewise.
            **kwargs: likewise.

        Returns:
            The result, and a dictionary like `buffers`. With `jax.value_and_grad(..,
            has_aux=True)` the new buffers are the auxiliary data, and in a `jax.lax.scan` they are
            part of the carry.

        Raises:
            KeyError: the names are not those of the module's parameters and of its buffers.
            ValueError: shapes or dtypes are not.
            TypeError: this is no module's function.
        """
        if not isinstance(self.__wrapped__, torch.nn.Module):
            raise TypeError("a plain function has no buffers; call it as f(*args)")
        self._check_rng(rng)
        _check_names(self.__wrapped__, params, "parameters")
        _check_names(self.__wrapped__, buffers, "buffers")
        tensors = expanded(modules.tensors(self.__wrapped__))
        module_tensors.check({**params, **buffers}, tensors, f"params and buffers of {self._name}")

        def code(arguments: Any, take: Take) -> Any:
            tensors: dict[str, Any] = {}
            result = self._of_module(arguments, take, tensors)
            after = expanded(tensors)
            return result, {name: after[name] for name in buffers}

        as_before = {name: like_argument(buffer) for name, buffer in buffers.items()}
        return self._cross(code, ({**params, **buffers}, args, kwargs), rng, as_before)

    def _cross(
        self, code: Any, arguments: Any, rng: Any, buffers: dict[str, Any] | None = None
    ) -> Any:
        """Run torch code on arrays, and return its results as arrays.

        Args:
            code: takes the arguments and a `Take`.
            arguments: its arguments, arrays of JAX among them.
            rng: a key, or None.
            buffers: the layouts of the new buffers, where those are the second of two results.
        """
        named = dict(
            zip(("params", "argument", "keyword")[-len(arguments) :], arguments, strict=True)
        )
        mesh = users_mesh({**named, "rng": rng}, self._name)

        def run(inputs: Any, shardings: ShardingById) -> Any:
            arguments, rng = inputs
            if is_tracing() or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
                function = functools.partial(code, arguments)
                return recorded(function, rng, shardings, self._name, self._repeat)
            with (
                tapes.immediately(keys(rng), imports=True),
                torch.enable_grad(),
                no_cpu_draws(self._name),
            ):
                return pytree.tree_map(Result.of, code(arguments, eager_take(shardings)))

        def layouts(results: Any) -> list[Any]:
            if buffers is None:
                return declared_layouts(self._out_sharding, results, self._name)
            return [
                *declared_layouts(self._out_sharding, results[0], self._name),
                *buffers.values(),
            ]

        return call_under_auto(run, (arguments, rng), mesh, layouts, self._name)

    def _of_function(self, arguments: Any, take: Take) -> Any:
        args, kwargs = _as_tensors(arguments, take)
        return self.__wrapped__(*args, **kwargs)

    def _of_module(self, arguments: Any, take: Take, tensors: dict[str, Any] | None = None) -> Any:
        """The module's result; `tensors` gets its parameters and buffers after the call."""
        params, args, kwargs = arguments
        module: Any = self.__wrapped__
        args, kwargs = _as_tensors((args, kwargs), take)
        tensors = {} if tensors is None else tensors
        tensors.update(module_tensors.replacements(params, dict(modules.tensors(module)), take))
        with module_tensors.unchanged(module, self._name):
            return torch.func.functional_call(module, tensors, args, kwargs)

    def _has_argument(self, name: str) -> bool:
        """Whether the torch code has an argument of this name."""
        target = self.__wrapped__
        code = target.forward if isinstance(target, torch.nn.Module) else target
        try:
            return name in inspect.signature(code).parameters
        except (TypeError, ValueError):  # C code has no signature
            return False

    def _check_rng(self, rng: Any) -> None:
        if rng is not None and self._has_argument("rng"):
            raise TypeError(
                f"{self._name} has an argument `rng` of its own, and rng= of jax_function is the "
                "JAX key for random numbers, so rng= is ambiguous. Pass the module's own by its "
                "position, or rename it"
            )

    @property
    def _name(self) -> str:
        return getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__)

    def _named(self, method: str) -> list[tuple[str, torch.Tensor]]:
        module = self.__wrapped__
        if not isinstance(module, torch.nn.Module):
            return []
        return list(expanded(getattr(module, method)()).items())

    def _arrays(self, named: list[tuple[str, torch.Tensor]]) -> dict[str, jax.Array]:
        empty = [name for name, tensor in named if tensor.is_meta]
        if empty:
            raise ValueError(
                f"{self._name} is on the meta device, so {', '.join(empty)} have no "
                "values. Pass arrays of your own, with the shapes in jax_function(module)"
                ".shapes, or fill the module: module.to_empty(device='cpu')"
            )
        return {name: constant(tensor, name) for name, tensor in named}


def jax_function(
    target: torch.nn.Module | Callable[..., Any],
    *,
    out_sharding: SpecLike = None,
    repeat: Repeat = None,
) -> JaxFunction:
    """Make a pure JAX function of a torch module or function.

    Args:
        target: an `nn.Module` on any device (also `meta`), called as `f(params, *args)`; or a
            function of tensors, called as `f(*args)`.
        out_sharding: the layouts of the results: a `PartitionSpec` over the mesh of the arguments
            or a `NamedSharding`, for all results or in a tree as theirs. Where it is None, the
            torch code or the compiler decides; see `isoshard.torch_bridge.interop.result_types`.
        repeat: "auto" makes loops (`jax.lax.scan`) of equal layers, so that the compile time of
            the function, and of its gradient, does not grow with depth. The arguments are as
            without; those of equal layers are stacked inside. Where there are no equal layers, or
            loops would copy too much for what is computed (few rows, on a CPU), there are none,
            and `iso.metrics.report()` says why. "always" makes them also then.

    Returns:
        A callable that works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`,
        `jax.checkpoint`, `jax.shard_map` and their compositions. Arguments on a mesh with Explicit
        axes are computed with under Auto ones, and results and gradients come on that mesh.

    Raises:
        TypeError: `target` cannot be called.
        ValueError: `repeat` is neither None, "auto" nor "always".

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("x", "y"))                     # axes are Explicit
        >>> put = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
        >>> x, w = jax.numpy.ones((8, 4), device=put("x")), jax.numpy.ones((4, 8), device=put(None, "y"))
        >>> jax.typeof(jax.jit(jax_function(torch.matmul))(x, w))
        ShapedArray(float32[8@x,8@y])
        >>> jax.typeof(jax_function(torch.matmul, out_sharding=jax.P("x"))(x, w))
        ShapedArray(float32[8@x,8])
    """  # noqa: E501
    if not callable(target):
        raise TypeError(
            f"jax_function takes a module or a function of tensors, not {type(target).__name__}; a "
            "tensor becomes an array with iso.to_jax"
        )
    return JaxFunction(target, out_sharding, repeat)


def _as_tensors(arguments: Any, take: Take) -> Any:
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_uneven)
    return jax.tree.unflatten(structure, list(map(take, leaves)))


def _check_names(module: torch.nn.Module, arrays: Any, kind: str) -> None:
    names = expanded(getattr(module, f"named_{kind}")())
    _check(arrays, names, f"{kind} of {type(module).__name__}", kind)


def _check(arrays: Any, names: Iterable[str], what: str, attribute: str) -> None:
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"{what} are a dictionary of arrays by name, like jax_function(module).{attribute}, "
            f"and come first: f(f.{attribute}, x), but got {type(arrays).__name__}"
        )
    unknown, missing = set(arrays) - set(names), set(names) - set(arrays)
    if unknown or missing:
        raise KeyError(
            f"{what} must have the names of jax_function(module).{attribute}; unknown are "
            f"{sorted(unknown)}, missing are {sorted(missing)}"
        )
