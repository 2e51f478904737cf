"""Reading and rewriting jaxprs, and the jaxprs in their equations, in every supported JAX.

Up to JAX 0.10 a program with constants is a `ClosedJaxpr` around a `Jaxpr`; from 0.11 on both are
one class, whose `jaxpr` is itself. Code that descends by `isinstance` of one of them recurses
without end in one of the two, so every walk over jaxprs in isoshard uses the functions below:

>>> import jax
>>> looped = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jax.numpy.sin(x), x))
>>> [eqn.primitive.name for eqn in equations(looped(1.0))]
['scan', 'add', 'sin']

A rewriter overrides what it changes, and gets an equal program back where nothing changed:

>>> class Doubled(JaxprRewriter):
...     def equation(self, eqn, context):
...         yield self.inside(eqn, context)
...         if eqn.primitive.name == "sin":
...             yield eqn
>>> [eqn.primitive.name for eqn in equations(Doubled().program(looped(1.0)))]
['scan', 'add', 'sin', 'sin']
>>> program = looped(1.0)
>>> JaxprRewriter().program(program) is program
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Jaxpr

PLAIN_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "core_closed_call", "eval_jaxpr"), "call_jaxpr"),
    "program_order": "call_jaxpr",
    **dict.fromkeys(("program_call", "program_results", "program_pullback"), "jaxpr"),
    "xla_metadata_call": "jaxpr",
}
"""Primitives that compute what one program computes, and the parameter that has it.

`eval_jaxpr` is what JAX 0.12 calls `closed_call`.
"""

CALLS = {
    **PLAIN_CALLS,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "split_operator": "jaxpr",  # layout/custom_partitioning.py
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""With those of functions that have a derivative of their own."""


ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul ne neg nextafter not
    one_minus_square or polygamma polynomial population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """.split()
)
"""Primitives whose result at a position depends on the operands at that position alone.

Scalar operands broadcast. An axis of the result is that axis of every operand: what `core/lifting`,
the planner's propagation and the checks of ONNX models build on.
"""


def is_jaxpr(value: Any) -> bool:
    """Whether a value, such as a parameter of an equation, is a jaxpr, closed or not.

    Args:
        value: anything.
    """
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def holds_jaxprs(value: Any) -> bool:
    """Whether a value is a jaxpr, or a tuple or list with one in it.

    Args:
        value: a parameter of an equation.
    """
    if type(value) in (tuple, list):
        return any(map(is_jaxpr, value))
    return is_jaxpr(value)


def opened(program: Any) -> Any:
    """The jaxpr that has the variables and equations of a program.

    Args:
        program: a jaxpr, closed or not.
    """
    return getattr(program, "jaxpr", program)


def closed(jaxpr: Any, consts: Iterable[Any] = ()) -> Any:
    """A jaxpr with the values of its constants.

    Args:
        jaxpr: an open one; of several inputs the first are its constants.
        consts: their values.
    """
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(list(consts))
    return ClosedJaxpr(jaxpr, list(consts))


def replaced(program: Any, **fields: Any) -> Any:
    """The same program with other equations or results; its constants stay.

    Args:
        program: a jaxpr, closed or not.
        **fields: `eqns`, `invars` or `outvars`.

    Returns:
        A program of the same class.
    """
    jaxpr = opened(program)
    changed = jaxpr.replace(**fields)
    return changed if jaxpr is program else program.replace(jaxpr=changed)


def equations(program: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of the jaxprs in their parameters.

    Args:
        program: a jaxpr, closed or not.
    """
    for eqn in program.eqns:
        yield eqn
        for nested in jaxprs_inside(eqn.params):
            yield from equations(nested)


def jaxprs_inside(params: Mapping[str, Any]) -> Iterator[Any]:
    """The programs in the parameters of an equation, closed or not, in tuples and lists too.

    Args:
        params: of the equation.
    """
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many its carry.

    Args:
        params: of the equation. Up to JAX 0.10 they have both counts, from 0.11 on trees of them.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x))
        >>> scan_counts(program(jax.numpy.ones(3)).eqns[-1].params)
        (0, 1)
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


class JaxprRewriter:
    """Rewrites a program and the programs in its equations; subclasses override what they change.

    A program that is called several times in the same context is rewritten once, and one in which
    nothing changes is returned as it is.
    """

    def __init__(self) -> None:
        """Nothing is rewritten at first."""
        self._rewritten: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def program(self, program: Any, context: Any = None) -> Any:
        """Rewrite a program.

        Args:
            program: a jaxpr, closed or not.
            context: hashable; passed on to `equation`.

        Returns:
            A program of the same class; nothing of the one given changes.
        """
        key = id(program), context
        if key not in self._rewritten:
            old = program.eqns
            new = [changed for eqn in old for changed in self.equation(eqn, context)]
            same = len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            self._rewritten[key] = program, program if same else replaced(program, eqns=new)
        return self._rewritten[key][1]

    def equation(self, eqn: Any, context: Any) -> Iterable[Any]:
        """The equations that take the place of one.

        Args:
            eqn: of a program.
            context: of that program.
        """
        yield self.inside(eqn, context)

    def inside(self, eqn: Any, context: Any) -> Any:
        """An equation with rewritten parameters.

        Args:
            eqn: of a program.
            context: for the programs in its parameters.

        Returns:
            The equation itself if no parameter changes.
        """
        params = {name: self.value(value, context) for name, value in eqn.params.items()}
        if all(params[name] is value for name, value in eqn.params.items()):
            return eqn
        return eqn.replace(params=params)

    def value(self, value: Any, context: Any) -> Any:
        """A parameter, or an item of one; programs in tuples and lists are rewritten too.

        Args:
            value: as it is.
            context: for programs.
        """
        if is_jaxpr(value):
            return self.program(value, context)
        if type(value) in (tuple, list):
            items = [self.value(item, context) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(items)
        return value
