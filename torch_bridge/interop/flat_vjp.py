"""A JAX function of flat arguments, and its VJP, which takes the residuals as arguments.

>>> import jax.numpy as jnp
>>> one = jax.ShapeDtypeStruct((), jnp.float32)
>>> f = Pulled(lambda x, y: {"product": x * y}, [one, one], [True, False])
>>> x, y = jnp.float32(3.0), jnp.float32(4.0)
>>> (product,) = f.forward(x, y)                 # `x` is not needed for the gradient of `x`
>>> f.kept                                        # and `y`, number 1, is
[1]
>>> f.backward([y], [jnp.float32(1.0)])
[Array(4., dtype=float32)]

A residual is often an operand or a result, which the caller has anyway; only the rest is given out
besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.layout.axis_types import is_typed
from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.jaxprs import closed, opened
from isoshard.core.runtime.shard_map_axes import varying, varying_over


class Pulled:
    """A function traced for operands like these.

    Attributes:
        structure: how the results are nested.
        operands: the abstract value of each operand.
        outs: the abstract value of each result.
        floating: numbers of the results that have gradients.
        wanted: numbers of the operands whose gradients are wanted.
        kept: for each residual, where it is among operands, results and the rest.
        rest: the abstract values of that rest.
        holds_tracers: the function closes over values of a JAX trace around it.
        program: the jaxpr.
    """

    structure: Any

    def __init__(
        self, function: Callable[..., Any], operands: Sequence[Any], wanted: Sequence[bool]
    ):
        """Trace the function, and its residuals if a gradient is wanted.

        Args:
            function: takes one array per operand; returns a pytree.
            operands: shape and dtype of each; and its layout, where that is part of its type.
            wanted: for each operand, whether its gradient is.
        """
        self.wanted = [number for number, want in enumerate(wanted) if want]
        self._pull: Any = None
        # Once: what the function closes over may be another when a gradient is asked for.
        traced = jax.make_jaxpr(self._flat(function))(*operands)
        self._function = jaxpr_as_fun(traced)
        if self.wanted:
            traced = jax.make_jaxpr(self._with_residuals)(*operands)
        self.holds_tracers = any(isinstance(const, Tracer) for const in traced.consts)
        self._compute = jaxpr_as_fun(traced)
        jaxpr = self.program = opened(traced)
        count = self.structure.num_leaves
        results = jaxpr.outvars[:count]
        self.operands = [var.aval for var in jaxpr.invars]
        self.outs = [var.aval for var in results]
        self.floating = [number for number, out in enumerate(self.outs) if _has_gradients(out)]
        places = {id(var): number for number, var in enumerate((*jaxpr.invars, *results))}
        self.kept: list[int] = []
        self._chosen = list(range(count))
        for number, var in enumerate(jaxpr.outvars[count:], count):
            if id(var) not in places:
                places[id(var)] = len(operands) + len(self._chosen)
                self._chosen.append(number)
            self.kept.append(places[id(var)])
        self.rest = [jaxpr.outvars[number].aval for number in self._chosen[count:]]

    @property
    def pulled(self) -> list[Any]:
        """The abstract values that `backward` takes: the residuals, and the gradients."""
        found = [*self.operands, *self.outs, *self.rest]
        return [*(found[place] for place in self.kept), *(self.outs[n] for n in self.floating)]

    def forward(self, *arrays: jax.Array) -> list[jax.Array]:
        """Compute the results and the rest.

        Args:
            *arrays: one per operand.

        Returns:
            The results, one per leaf of `structure`, then what `rest` describes.
        """
        results = self._compute(*arrays)
        return [results[number] for number in self._chosen]

    def backward(
        self, kept: Sequence[jax.Array], grads: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Compute the VJP.

        Args:
            kept: the residuals, at the places that `kept` names.
            grads: one per floating result; None stands for zeros.

        Returns:
            The gradients of the wanted operands.
        """
        return self._gradients(jax.tree.unflatten(self._pull, kept), grads, self.outs)

    def gradient(
        self, arrays: Sequence[jax.Array], grads: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """The same from the operands, so that it can itself be differentiated with respect to them.

        Args:
            arrays: one per operand.
            grads: as for `backward`.

        Returns:
            The gradients of the wanted operands.
        """
        results, pull = self._differentiated(arrays)
        return self._gradients(pull, grads, list(map(jax.typeof, results)))

    def _flat(self, function: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
        def flat(*arrays: jax.Array) -> list[jax.Array]:
            results, self.structure = jax.tree.flatten(function(*arrays))
            return [jnp.asarray(result) for result in results]

        return flat

    def _with_residuals(self, *arrays: jax.Array) -> list[Any]:
        results, pull = self._differentiated(arrays)
        needed, self._pull = jax.tree.flatten(pull)
        return [*results, *needed]

    def _differentiated(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], Any]:
        return jax.vjp(self._of_wanted(arrays), *(arrays[number] for number in self.wanted))

    def _of_wanted(self, arrays: Sequence[jax.Array]) -> Callable[..., list[jax.Array]]:
        """The results as a function of the operands whose gradients are wanted."""

        def of_wanted(*chosen: jax.Array) -> list[jax.Array]:
            given = list(arrays)
            for number, array in zip(self.wanted, chosen, strict=True):
                given[number] = array
            return self._function(*given)

        return of_wanted

    def _gradients(
        self, pull: Any, grads: Sequence[jax.Array | None], outs: Sequence[Any]
    ) -> list[jax.Array]:
        """Torch's gradient of a complex number is the conjugate of JAX's."""
        given = iter(grads)
        cotangents = [
            _cotangent(next(given), out)
            if _has_gradients(out)
            else np.zeros(out.shape, jax.dtypes.float0)
            for out in outs
        ]
        return [jnp.conj(found) for found in pull(cotangents)]


def hoisted(
    function: Callable[..., Any], operands: Sequence[Any]
) -> tuple[list[Tracer], Callable[..., Any]]:
    """A function that closes over values of a JAX trace, as one that takes them as operands.

    Args:
        function: takes one array per operand; returns a pytree.
        operands: shape and dtype of each.

    Returns:
        Those values; and the function, which takes them behind the operands.
    """
    structures: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        results, structure = jax.tree.flatten(function(*arrays))
        structures[:] = [structure]
        return results

    traced = jax.make_jaxpr(flat)(*operands)
    found = [const for const in traced.consts if isinstance(const, Tracer)]

    def run(*arrays: Any) -> Any:
        values = iter(arrays[len(operands) :])
        consts = [next(values) if isinstance(one, Tracer) else one for one in traced.consts]
        program = closed(opened(traced), consts)
        return jax.tree.unflatten(structures[0], jaxpr_as_fun(program)(*arrays[: len(operands)]))

    return found, run


def _has_gradients(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _cotangent(grad: jax.Array | None, out: Any) -> jax.Array:
    """What JAX takes for a gradient: of what all devices have alike, the sum of what each says.

    Args:
        grad: torch's; None for zeros.
        out: the abstract value of the result.
    """
    if grad is None:
        found = varying_over(jnp.zeros(out.shape, out.dtype), varying(out))
    else:
        found = jnp.conj(grad.astype(out.dtype))
        shared = tuple(sorted(varying(grad) - varying(out)))
        found = jax.lax.psum(found, shared) if shared else found
    return jax.sharding.reshard(found, out.sharding) if is_typed(out.sharding.mesh) else found
