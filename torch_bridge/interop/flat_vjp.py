"""A JAX function of flat arguments, and its VJP, which takes the residuals as arguments.

>>> import jax.numpy as jnp
>>> scalar = jax.ShapeDtypeStruct((), jnp.float32)
>>> f = FlatVjp(lambda x, y: {"product": x * y}, [scalar, scalar], [True, False])
>>> x, y = jnp.float32(3.0), jnp.float32(4.0)
>>> (product,) = f.forward(x, y)                 # `x` is not needed for the gradient of `x`
>>> f.residual_positions                          # and `y`, operand 1, is
[1]
>>> f.backward([y], [jnp.float32(1.0)])
[Array(4., dtype=float32)]

A residual is often an operand or a result, which the caller has anyway; `forward` returns only the
others in addition.
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


class FlatVjp:
    """A function traced for operands like these.

    Attributes:
        structure: how the results are nested.
        operands: the abstract value of each operand.
        outs: the abstract value of each result.
        floating: indices of the results that have gradients.
        argnums: indices of the operands whose gradients are computed.
        residual_positions: of each residual its index among operands, results and `rest`.
        rest: the abstract values of the residuals that are neither operands nor results.
        holds_tracers: the function closes over values of a JAX trace around it.
        program: the jaxpr.
    """

    structure: Any

    def __init__(
        self, function: Callable[..., Any], operands: Sequence[Any], needs_grad: Sequence[bool]
    ):
        """Trace the function, and its residuals if a gradient is needed.

        Args:
            function: takes one array per operand; returns a pytree.
            operands: shape and dtype of each; and its layout, where that is part of its type.
            needs_grad: for each operand, whether its gradient is computed.
        """
        self.argnums = [index for index, needed in enumerate(needs_grad) if needed]
        self._pull: Any = None
        # Traced once: what the function closes over may have changed when a gradient is computed.
        traced = jax.make_jaxpr(self._flat(function))(*operands)
        self._function = jaxpr_as_fun(traced)
        if self.argnums:
            traced = jax.make_jaxpr(self._with_residuals)(*operands)
        self.holds_tracers = any(isinstance(const, Tracer) for const in traced.consts)
        self._compute = jaxpr_as_fun(traced)
        jaxpr = self.program = opened(traced)
        count = self.structure.num_leaves
        results = jaxpr.outvars[:count]
        self.operands = [var.aval for var in jaxpr.invars]
        self.outs = [var.aval for var in results]
        self.floating = [index for index, out in enumerate(self.outs) if _has_gradients(out)]
        positions = {id(var): position for position, var in enumerate((*jaxpr.invars, *results))}
        self.residual_positions: list[int] = []
        self._chosen = list(range(count))
        for index, var in enumerate(jaxpr.outvars[count:], count):
            if id(var) not in positions:
                positions[id(var)] = len(operands) + len(self._chosen)
                self._chosen.append(index)
            self.residual_positions.append(positions[id(var)])
        self.rest = [jaxpr.outvars[index].aval for index in self._chosen[count:]]

    @property
    def backward_avals(self) -> list[Any]:
        """The abstract values that `backward` takes: the residuals, and the gradients."""
        avals = [*self.operands, *self.outs, *self.rest]
        return [
            *(avals[position] for position in self.residual_positions),
            *(self.outs[n] for n in self.floating),
        ]

    def forward(self, *arrays: jax.Array) -> list[jax.Array]:
        """Compute the results and the rest.

        Returns:
            The results, one per leaf of `structure`, then what `rest` describes.
        """
        results = self._compute(*arrays)
        return [results[index] for index in self._chosen]

    def backward(
        self, residuals: Sequence[jax.Array], grads: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Compute the VJP.

        Args:
            residuals: in the order of `residual_positions`.
            grads: one per floating result; None stands for zeros.

        Returns:
            The gradients of the operands `argnums`.
        """
        return self._gradients(jax.tree.unflatten(self._pull, residuals), grads, self.outs)

    def gradient(
        self, arrays: Sequence[jax.Array], grads: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """The same from the operands, so that it can itself be differentiated with respect to them.

        Args:
            arrays: one per operand.
            grads: as for `backward`.

        Returns:
            The gradients of the operands `argnums`.
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
        return jax.vjp(self._of_argnums(arrays), *(arrays[index] for index in self.argnums))

    def _of_argnums(self, arrays: Sequence[jax.Array]) -> Callable[..., list[jax.Array]]:
        """The results as a function of the operands `argnums`."""

        def of_argnums(*chosen: jax.Array) -> list[jax.Array]:
            operands = list(arrays)
            for index, array in zip(self.argnums, chosen, strict=True):
                operands[index] = array
            return self._function(*operands)

        return of_argnums

    def _gradients(
        self, pull: Any, grads: Sequence[jax.Array | None], outs: Sequence[Any]
    ) -> list[jax.Array]:
        """Torch's gradient of a complex number is the conjugate of JAX's."""
        grads_left = iter(grads)
        cotangents = [
            _cotangent(next(grads_left), out)
            if _has_gradients(out)
            else np.zeros(out.shape, jax.dtypes.float0)
            for out in outs
        ]
        return [jnp.conj(gradient) for gradient in pull(cotangents)]


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
    tracers = [const for const in traced.consts if isinstance(const, Tracer)]

    def run(*arrays: Any) -> Any:
        values = iter(arrays[len(operands) :])
        consts = [next(values) if isinstance(const, Tracer) else const for const in traced.consts]
        program = closed(opened(traced), consts)
        return jax.tree.unflatten(structures[0], jaxpr_as_fun(program)(*arrays[: len(operands)]))

    return tracers, run


def _has_gradients(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _cotangent(grad: jax.Array | None, out: Any) -> jax.Array:
    """A gradient of torch as a cotangent of JAX: summed over devices that share the result.

    Args:
        grad: torch's; None for zeros.
        out: the abstract value of the result.
    """
    if grad is None:
        cotangent = varying_over(jnp.zeros(out.shape, out.dtype), varying(out))
    else:
        cotangent = jnp.conj(grad.astype(out.dtype))
        shared = tuple(sorted(varying(grad) - varying(out)))
        cotangent = jax.lax.psum(cotangent, shared) if shared else cotangent
    return (
        jax.sharding.reshard(cotangent, out.sharding) if is_typed(out.sharding.mesh) else cotangent
    )
