"""Which axes of an equation's operands and results are the same dimension.

A rule is written as Shardy writes its `OpShardingRule`: a *factor* is one dimension of the
operation, and each axis of an operand or result is a tuple of factors, the outermost first. Most
axes are one factor; a reshape splits and merges axes, so an axis may be several there.

>>> import jax
>>> import jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((8, 4)), jnp.ones((4, 6)))
>>> rule = dimension_rule(program.eqns[0])
>>> rule.operands, rule.results
((((1,), (0,)), ((0,), (2,))), (((1,), (2,)),))
>>> rule.sizes, rule.reduced
((4, 8, 6), frozenset({0}))

Rules by family are in `moved_dimensions`, `contracted_dimensions` and `indexed_dimensions`; here is
the table of which primitive has which.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.jaxprs import CALLS, is_elementwise, programs

from . import contracted_dimensions as contracted
from . import indexed_dimensions as indexed
from . import moved_dimensions as moved
from .factors import DimensionRule, Factors, Shape

RuleOf = Callable[[Factors, Mapping[str, Any]], DimensionRule]
"""Makes the rule of one equation from its shapes and parameters."""

_FAMILIES: tuple[tuple[str, RuleOf], ...] = (
    (
        "optimization_barrier device_put name sharding_constraint reshard layout_constraint "
        "mesh_cast",
        moved.same,
    ),
    (
        "broadcast_in_dim",
        moved.broadcast_in_dim,
    ),
    (
        "transpose",
        moved.transpose,
    ),
    (
        "squeeze",
        moved.squeeze,
    ),
    (
        "reshape expand_dims",
        moved.reshape,
    ),
    (
        "concatenate",
        moved.concatenate,
    ),
    (
        "stack",
        moved.stack,
    ),
    (
        "unstack",
        moved.unstack,
    ),
    (
        "split",
        moved.split,
    ),
    (
        "slice pad",
        moved.resized,
    ),
    (
        "rev",
        moved.reverse,
    ),
    (
        "tile",
        moved.tile,
    ),
    (
        "sort",
        moved.sort,
    ),
    (
        "top_k approx_top_k",
        moved.top_k,
    ),
    (
        "fft cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3 "
        "householder_product triangular_solve eig eigh svd schur hessenberg tridiagonal "
        "tridiagonal_solve ormqr symmetric_product lapack_qr",
        moved.leading,
    ),
    (
        "random_bits random_split random_wrap random_unwrap random_seed random_clone "
        "bitcast_convert_type",
        moved.prefix,
    ),
    (
        "iota empty empty2 rng_uniform axis_index partition_id",
        moved.free,
    ),
    (
        "rng_bit_generator custom_linear_solve linear_solve ffi_call pure_callback io_callback "
        "debug_callback debug_print create_token after_all random_shuffle pallas_call",
        moved.whole,
    ),
    (
        f"{' '.join(CALLS)} custom_lin scan while cond shard_map custom_partitioning "
        "custom_partitioning_call",
        moved.free,
    ),
    (
        "psum psum2 psum_invariant unreduced_pmax unreduced_pmin pmax pmin ppermute pbroadcast "
        "all_gather all_gather_invariant all_to_all reduce_scatter psum_scatter ragged_all_to_all",
        moved.whole,
    ),
    (
        "dot_general",
        contracted.dot_general,
    ),
    (
        "ragged_dot_general",
        contracted.ragged_dot_general,
    ),
    (
        "conv_general_dilated",
        contracted.convolution,
    ),
    (
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce "
        "argmax argmin",
        contracted.reduction,
    ),
    (
        "cumsum cumprod cummax cummin cumlogsumexp",
        contracted.cumulative,
    ),
    (
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min",
        contracted.reduce_window,
    ),
    (
        "select_and_scatter select_and_scatter_add select_and_gather_add",
        contracted.select_and_scatter,
    ),
    (
        "dynamic_slice",
        indexed.dynamic_slice,
    ),
    (
        "dynamic_update_slice",
        indexed.dynamic_update_slice,
    ),
    (
        "gather",
        indexed.gather,
    ),
    (
        "scatter",
        indexed.scatter,
    ),
    (
        "scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
        "scatter_max scatter-sub scatter_sub",
        indexed.scatter_sum,
    ),
)
_TABLE = {name: rule for names, rule in _FAMILIES for name in names.split()}


def is_known(name: str) -> bool:
    """Whether a primitive has a rule.

    Args:
        name: of the primitive.
    """
    return is_elementwise(name) or name in _TABLE


def dimension_rule(equation: JaxprEqn) -> DimensionRule:
    """The rule of one equation.

    Args:
        equation: of a jaxpr. One with programs of its own (a call, a loop, a branch) ties nothing
            here; `nested_programs.bodies` says what its axes are inside.

    Returns:
        The rule. Of a primitive without one each axis is a whole factor of its own;
        `unknown_primitives` lists those.
    """
    name = equation.primitive.name
    operands = tuple([_shape(one.aval) for one in equation.invars])
    results = tuple([_shape(one.aval) for one in equation.outvars])
    if is_elementwise(name):
        return elementwise_rule(operands, results)
    params = equation.params
    if name not in _TABLE:
        return Factors(operands, results).rule(rest_whole=True)
    plain = tuple(one for one in params.items() if "jaxpr" not in one[0])
    try:
        return _cached(name, operands, results, plain)
    except TypeError:  # a parameter has no hash
        return _TABLE[name](Factors(operands, results), params)


def primitives(program: Any) -> dict[str, int]:
    """Primitives of a program, at any depth, and how often each occurs.

    Args:
        program: a jaxpr, closed or not.
    """
    names = (eqn.primitive.name for jaxpr in programs(program) for eqn in jaxpr.eqns)
    return dict(collections.Counter(names))


@cached(1 << 14)
def _cached(
    name: str,
    operands: tuple[Shape, ...],
    results: tuple[Shape, ...],
    params: tuple[tuple[str, Any], ...],
) -> DimensionRule:
    return _TABLE[name](Factors(operands, results), dict(params))


@cached(1 << 14)
def elementwise_rule(operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> DimensionRule:
    """The rule of an operation element by element: axes of the result's size are its axes.

    Args:
        operands: shapes.
        results: shapes.
    """
    shape = max((*operands, *results), key=lambda one: (len(one), math.prod(one)))
    factors = Factors(operands, results)
    for axis, size in enumerate(shape):
        factors.tie(
            {n: axis for n, s in enumerate(operands) if len(s) == len(shape) and s[axis] == size},
            {n: axis for n, s in enumerate(results) if len(s) == len(shape) and s[axis] == size},
            size,
        )
    return factors.rule()


def _shape(aval: Any) -> Shape:
    return getattr(aval, "shape", ())
