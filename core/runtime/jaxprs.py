"""Walks over jaxprs in every supported JAX: reading, evaluating, inlining calls, rewriting.

Up to JAX 0.10 a program with constants is a `ClosedJaxpr` around a `Jaxpr`; from 0.11 on both are
one class, whose `jaxpr` is itself. Code that descends by `isinstance` of one of them recurses
without end in one of the two, so every walk over jaxprs in isoshard uses the functions below.
`nested_programs.bodies` adds how values pass between an equation and the programs in it.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._jax_internals.jaxpr_classes import ClosedJaxpr, Jaxpr, Literal, Var

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

_ON_KEYS_AND_TYPES = frozenset(
    (
        "is_not_a_number mulhi pvary random_fold_in random_gamma random_gamma_grad "
        "reduced_vary_cast symbolic_zeros threefry2x32 vary_unreduced_cast"
    ).split()
)
"""The same of axes; `core/lifting` has rules of its own for them, or none."""


def is_elementwise(name: str) -> bool:
    """Whether the primitive of a name computes element by element."""
    return name in ELEMENTWISE or name in _ON_KEYS_AND_TYPES


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, closed or not."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def holds_jaxprs(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, or a tuple or list with one in it."""
    if type(value) in (tuple, list):
        return any(map(is_jaxpr, value))
    return is_jaxpr(value)


def opened(program: Any) -> Any:
    """The jaxpr that has the variables and equations of a program, closed or not."""
    return getattr(program, "jaxpr", program)


def closed(jaxpr: Any, consts: Iterable[Any] = ()) -> Any:
    """A jaxpr with the values of its constants.

    Args:
        jaxpr: an open one; where it has no `constvars`, its first inputs are the constants.
        consts: their values.
    """
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(list(consts))
    return ClosedJaxpr(jaxpr, list(consts))


def replaced(program: Any, **fields: Any) -> Any:
    """A program of the same class and constants with other `eqns`, `invars` or `outvars`."""
    jaxpr = opened(program)
    changed = jaxpr.replace(**fields)
    return changed if jaxpr is program else program.replace(jaxpr=changed)


def equations(program: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of the jaxprs in their parameters, at any depth.

    A program that is called twice is read twice; `programs` gives each once.
    """
    for eqn in program.eqns:
        yield eqn
        for nested in jaxprs_inside(eqn.params):
            yield from equations(nested)


def programs(program: Any) -> Iterator[Any]:
    """The open jaxpr of a program and those at any depth in it, each once."""
    seen: set[int] = set()
    stack = [opened(program)]
    while stack:
        jaxpr = stack.pop()
        if id(jaxpr) not in seen:
            seen.add(id(jaxpr))
            yield jaxpr
            for eqn in jaxpr.eqns:
                stack += map(opened, jaxprs_inside(eqn.params))


def jaxprs_inside(params: Mapping[str, Any]) -> Iterator[Any]:
    """The programs in the parameters of an equation, closed or not, in tuples and lists too."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def needed(eqns: Sequence[Any], results: Iterable[Any]) -> list[Any]:
    """The equations that results (variables or literals) depend on, and those with effects."""
    atoms = {atom for atom in results if not isinstance(atom, Literal)}
    eqns_needed = []
    for eqn in reversed(eqns):
        if eqn.effects or not atoms.isdisjoint(eqn.outvars):
            eqns_needed.append(eqn)
            atoms.update([atom for atom in eqn.invars if not isinstance(atom, Literal)])
    return eqns_needed[::-1]


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


def bind(eqn: Any, operands: Sequence[Any], /, **changed: Any) -> list[Any]:
    """The results of an equation's primitive on other operands.

    Args:
        eqn: an equation.
        operands: arrays or tracers.
        **changed: parameters that differ from those of the equation.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX before 0.10
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate(
    program: Any,
    args: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]] = bind,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """The results of a program, equation by equation.

    Args:
        program: a jaxpr, closed or not.
        args: a value for each input, of any type that `apply` takes.
        apply: the results of an equation and its operands.
        constant: the value of a literal or a constant of the program.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x: jax.numpy.sin(x) * 2.0)(1.0)
        >>> float(evaluate(program, [0.0])[0])
        0.0
        >>> evaluate(program, ["x"], lambda eqn, args: [f"{eqn.primitive}({', '.join(args)})"], str)
        ['mul(sin(x), 2.0)']
    """
    jaxpr = opened(program)
    values = dict(zip(jaxpr.constvars, map(constant, getattr(program, "consts", ())), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, apply(eqn, [*map(read, eqn.invars)]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inlined(program: Any, called: Callable[[Any], Any]) -> Any:
    """A program with some of its calls written out where they are.

    Args:
        program: a jaxpr, closed or not.
        called: the jaxpr without constants that an equation calls with its operands, or None to
            leave the equation. It is not called for the equations that are inlined.
    """
    jaxpr = opened(program)
    inner = [called(eqn) for eqn in jaxpr.eqns]
    if all(body is None for body in inner):
        return program
    names: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn, body in zip(jaxpr.eqns, map(opened, inner), strict=True):
        operands = substituted(eqn.invars, names)
        if body is None:
            eqns.append(eqn.replace(invars=operands))
            continue
        inside = dict(zip(body.invars, operands, strict=True))
        for step in body.eqns:  # a program may be called often: each call has its own results
            outvars = [Var(variable.aval) for variable in step.outvars]
            eqns.append(step.replace(invars=substituted(step.invars, inside), outvars=outvars))
            inside.update(zip(step.outvars, outvars, strict=True))
        names.update(zip(eqn.outvars, substituted(body.outvars, inside), strict=True))
    return replaced(program, eqns=eqns, outvars=substituted(jaxpr.outvars, names))


def substituted(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    """Variables and literals, with the variables in `names` exchanged."""
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


class JaxprRewriter:
    """Rewrites a program and the programs in its equations; subclasses override what they change.

    A program that is called several times in the same context is rewritten once, and one in which
    nothing changes is returned as it is. A context is hashable and passed on to `equation`.
    """

    def __init__(self) -> None:
        """Nothing is rewritten at first."""
        self._rewritten: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def program(self, program: Any, context: Any = None) -> Any:
        """A rewritten program of the same class; the argument does not change."""
        key = id(program), context
        if key not in self._rewritten:
            old = program.eqns
            new = [changed for eqn in old for changed in self.equation(eqn, context)]
            same = len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            self._rewritten[key] = program, program if same else replaced(program, eqns=new)
        return self._rewritten[key][1]

    def equation(self, eqn: Any, context: Any) -> Iterable[Any]:
        """The equations that replace an equation of a program with a context."""
        yield self.inside(eqn, context)

    def inside(self, eqn: Any, context: Any) -> Any:
        """An equation with rewritten parameters; itself if none changes."""
        params = {name: self.value(value, context) for name, value in eqn.params.items()}
        if all(params[name] is value for name, value in eqn.params.items()):
            return eqn
        return eqn.replace(params=params)

    def value(self, value: Any, context: Any) -> Any:
        """A parameter, or an item of one; programs in tuples and lists are rewritten too."""
        if is_jaxpr(value):
            return self.program(value, context)
        if type(value) in (tuple, list):
            items = [self.value(item, context) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(items)
        return value
