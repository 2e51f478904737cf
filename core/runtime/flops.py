"""Floating-point operations of equations and of programs, on unsharded operands.

Products and convolutions count two for each multiplication and addition, reductions and
elementwise operations one for each element, what only moves elements none. A kernel of Pallas
counts its author's `cost_estimate`, or else its body once for each point of its grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .jaxprs import is_elementwise, opened
from .nested_programs import bodies

_MOVED = frozenset("convert_element_type copy stop_gradient select_n pvary bitcast".split())


def flops_of(equation: Any) -> float:
    """The operations of one equation of a jaxpr.

    Args:
        equation: without programs of its own, or a kernel of Pallas.
    """
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return _kernel(params)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2.0 * _elements(equation.outvars[0]) * math.prod([lhs[axis] for axis in contracted])
    if name == "ragged_dot_general":
        dimensions = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dimensions.dot_dimension_numbers
        lhs, rhs = (var.aval.shape for var in equation.invars[:2])
        grouped = math.prod([rhs[axis] for axis in dimensions.rhs_group_dimensions])
        free = math.prod(rhs) / grouped / math.prod([lhs[axis] for axis in contracted])
        return 2.0 * math.prod(lhs) * max(1.0, free)
    if name == "conv_general_dilated":
        rhs = equation.invars[1].aval.shape
        features = rhs[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _elements(equation.outvars[0]) * math.prod(rhs) / features
    if name.startswith(("reduce_", "cum", "arg")) and name != "reduce_precision":
        elements = _elements(equation.invars[0])
        return elements * float(math.prod(params.get("window_dimensions", (1,))))
    if is_elementwise(name) and name not in _MOVED:
        return float(_elements(equation.outvars[0]))
    return 0.0


def is_product(name: str) -> bool:
    """Whether the primitive of a name multiplies and sums."""
    return name in ("dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call")


def _kernel(params: Mapping[str, Any]) -> float:
    if params["cost_estimate"] is not None:
        return float(params["cost_estimate"].flops)
    # A size that is known only when it runs counts as one.
    points = math.prod([size for size in params["grid_mapping"].grid if isinstance(size, int)])
    return points * program_flops(params["jaxpr"])


def program_flops(program: Any) -> float:
    """The operations of a jaxpr, closed or not, at any depth.

    A `scan` counts each iteration, a `while` one, a `cond` the branch that computes most.

    Example:
        >>> import jax
        >>> def layers(x, w):
        ...     return jax.lax.scan(lambda h, row: (h @ row, None), x, w)[0]
        >>> program_flops(jax.make_jaxpr(layers)(jax.numpy.ones((8, 4)), jax.numpy.ones((3, 4, 4))))
        768.0
    """
    total = 0.0
    for equation in opened(program).eqns:
        inner = bodies(equation)
        if not inner:
            scoped = equation.params.get("jaxpr")
            is_leaf = scoped is None or equation.primitive.name == "pallas_call"
            total += flops_of(equation) if is_leaf else program_flops(scoped)
            continue
        each = [body.times * program_flops(body.jaxpr) for body in inner]
        total += max(each) if inner[0].kind == "branch" else sum(each)
    return total


def _elements(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))
