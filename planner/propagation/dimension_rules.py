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

Rules by family are in `primitive_rules`; this module has the table of primitives.

Operators of `custom_partitioning` declare their rule as a text such as `"i j, j k -> i k"`, with
names in brackets where an axis is several dimensions, and the sizes that it omits.

>>> shapes = [(2, 8, 16), (2, 4, 32)]
>>> rule = parsed_rule("b (h g) l, b h s -> b (h g) l", shapes, shapes[:1], {"g": 2})
>>> rule.operands, rule.results
((((0,), (1, 2), (3,)), ((0,), (1,), (4,))), (((0,), (1, 2), (3,)),))
>>> rule.sizes
(2, 4, 2, 16, 32)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isoshard.core.kit import CALLS, JaxprEqn, is_elementwise, jaxprs_inside, opened

from . import primitive_rules
from .factors import Axes, DimensionRule, Factors, Shape

RuleOf = Callable[[Factors, Mapping[str, Any]], DimensionRule]
"""Makes the rule of one equation from its shapes and parameters."""

_FAMILIES: tuple[tuple[str, RuleOf], ...] = (
    (
        "optimization_barrier device_put name sharding_constraint reshard layout_constraint "
        "mesh_cast",
        primitive_rules.same,
    ),
    ("broadcast_in_dim", primitive_rules.broadcast_in_dim),
    ("transpose", primitive_rules.transpose),
    ("squeeze", primitive_rules.squeeze),
    ("reshape expand_dims", primitive_rules.reshape),
    ("concatenate", primitive_rules.concatenate),
    ("stack", primitive_rules.stack),
    ("unstack", primitive_rules.unstack),
    ("split", primitive_rules.split),
    ("slice pad", primitive_rules.resized),
    ("rev", primitive_rules.reverse),
    ("tile", primitive_rules.tile),
    ("sort", primitive_rules.sort),
    ("top_k approx_top_k", primitive_rules.top_k),
    (
        "fft cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3 "
        "householder_product triangular_solve eig eigh svd schur hessenberg tridiagonal "
        "tridiagonal_solve ormqr symmetric_product lapack_qr",
        primitive_rules.leading,
    ),
    (
        "random_bits random_split random_wrap random_unwrap random_seed random_clone "
        "bitcast_convert_type",
        primitive_rules.prefix,
    ),
    ("iota empty empty2 rng_uniform axis_index partition_id", primitive_rules.free),
    (
        "rng_bit_generator custom_linear_solve linear_solve ffi_call pure_callback io_callback "
        "debug_callback debug_print create_token after_all random_shuffle pallas_call",
        primitive_rules.unsharded,
    ),
    (
        f"{' '.join(CALLS)} custom_lin scan while cond shard_map custom_partitioning "
        "custom_partitioning_call",
        primitive_rules.free,
    ),
    (
        "psum psum2 psum_invariant unreduced_pmax unreduced_pmin pmax pmin ppermute pbroadcast "
        "all_gather all_gather_invariant all_to_all reduce_scatter psum_scatter ragged_all_to_all",
        primitive_rules.unsharded,
    ),
    ("dot_general", primitive_rules.dot_general),
    ("ragged_dot_general", primitive_rules.ragged_dot_general),
    ("conv_general_dilated", primitive_rules.convolution),
    (
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce "
        "argmax argmin",
        primitive_rules.reduction,
    ),
    ("cumsum cumprod cummax cummin cumlogsumexp", primitive_rules.cumulative),
    (
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min",
        primitive_rules.reduce_window,
    ),
    (
        "select_and_scatter select_and_scatter_add select_and_gather_add",
        primitive_rules.select_and_scatter,
    ),
    ("dynamic_slice", primitive_rules.dynamic_slice),
    ("dynamic_update_slice", primitive_rules.dynamic_update_slice),
    ("gather", primitive_rules.gather),
    ("scatter", primitive_rules.scatter),
    (
        "scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
        "scatter_max scatter-sub scatter_sub",
        primitive_rules.scatter_sum,
    ),
)
_TABLE = {name: rule for names, rule in _FAMILIES for name in names.split()}


def has_rule(name: str) -> bool:
    """Whether a primitive has a rule."""
    return is_elementwise(name) or name in _TABLE


def dimension_rule(equation: JaxprEqn) -> DimensionRule:
    """The rule of one equation.

    Args:
        equation: of a jaxpr. One with programs of its own (a call, a loop, a branch) ties nothing
            here; `nested_programs.bodies` links its axes to those inside.

    Returns:
        The rule. Of a primitive without one each axis is an unsharded factor of its own;
        `trace_notes` lists those.
    """
    name = equation.primitive.name
    operands = tuple([_shape(var.aval) for var in equation.invars])
    results = tuple([_shape(var.aval) for var in equation.outvars])
    if is_elementwise(name):
        return elementwise_rule(operands, results)
    params = equation.params
    if name not in _TABLE:
        return Factors(operands, results).rule(rest_unsharded=True)
    plain = tuple(param for param in params.items() if "jaxpr" not in param[0])
    try:
        return _cached(name, operands, results, plain)
    except TypeError:  # a parameter has no hash
        return _TABLE[name](Factors(operands, results), params)


def primitives(program: Any) -> dict[str, int]:
    """Primitives of a program, at any depth, and how often each occurs."""
    counts: dict[str, int] = {}
    visited: set[int] = set()
    stack = [opened(program)]
    while stack:
        jaxpr = stack.pop()
        if id(jaxpr) in visited:
            continue
        visited.add(id(jaxpr))
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            counts[name] = counts.get(name, 0) + 1
            stack += map(opened, jaxprs_inside(equation.params))
    return counts


@functools.lru_cache(maxsize=1 << 14)
def _cached(
    name: str,
    operands: tuple[Shape, ...],
    results: tuple[Shape, ...],
    params: tuple[tuple[str, Any], ...],
) -> DimensionRule:
    return _TABLE[name](Factors(operands, results), dict(params))


@functools.lru_cache(maxsize=1 << 14)
def elementwise_rule(operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> DimensionRule:
    """The rule of an operation element by element: axes of the result's size are its axes."""
    shape = max((*operands, *results), key=lambda shape: (len(shape), math.prod(shape)))
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


_AXIS = re.compile(r"\(([^)]*)\)|(\S+)")


def declared_rule(equation: Any) -> DimensionRule | None:
    """The rule that an operator of `custom_partitioning` declares.

    Returns:
        The rule; None if it is no such operator, or declares it other than by a text.
    """
    if equation.primitive.name != "custom_partitioning":
        return None
    rule_of, static = equation.params["sharding_rule"], equation.params["static_args"]
    if not callable(rule_of):
        return None
    operands, results = (
        [var.aval for var in variables] for variables in (equation.invars, equation.outvars)
    )
    declared = rule_of(*static, None, operands, results)
    text, sizes = declared if isinstance(declared, tuple) else (declared, {})
    if not isinstance(text, str):
        return None
    return parsed_rule(
        text,
        [argument.shape for argument in operands],
        [argument.shape for argument in results],
        sizes,
    )


def parsed_rule(
    text: str, operands: Sequence[Shape], results: Sequence[Shape], sizes: Mapping[str, int]
) -> DimensionRule:
    """Read a rule in the notation of `custom_partitioning`."""
    left, right = text.split("->")
    named = [[_axes(axis) for axis in side.split(",")] for side in (left, right)]
    size_of = dict(sizes)
    arrays = [*zip(named[0], operands, strict=True), *zip(named[1], results, strict=True)]
    for several in (False, True):  # sizes of single names first, then the last of several
        for axes, shape in arrays:
            for names, size in zip(axes, shape, strict=True):
                new = [name for name in names if name not in size_of]
                if len(new) == 1 and (several or len(names) == 1):
                    size_of[new[0]] = size // math.prod(
                        size_of[name] for name in names if name in size_of
                    )
    every = [name for axes, _ in arrays for names in axes for name in names]
    index = {name: at for at, name in enumerate(dict.fromkeys(every))}

    def numbered(axes_of_arrays: list[list[tuple[str, ...]]]) -> tuple[Axes, ...]:
        return tuple(
            tuple(tuple(index[name] for name in names) for names in axes) for axes in axes_of_arrays
        )

    return DimensionRule(
        numbered(named[0]), numbered(named[1]), tuple(size_of[name] for name in index)
    )


def _axes(text: str) -> list[tuple[str, ...]]:
    """The names of each axis of one array."""
    findall = _AXIS.findall(text)
    return [tuple(several.split()) if several else (alone,) for several, alone in findall]
