"""Equal equations have equal keys: primitive, parameters by value, shapes and dtypes.

Which values an equation reads is no part of its key, nor are literals' values: those may differ
from one repeat to the next. Subjaxprs (of `jit`, `scan`) are compared up to the names of their
variables. The key of a `slice` has no position: `table[0]`, `table[1]`, .. are rows of one table.

>>> import jax
>>> def program(x, y):
...     return jax.numpy.sin(x) * 2.0 + jax.numpy.sin(y) * 3.0
>>> flow = EquationFlow.of(jax.make_jaxpr(program)(1.0, 2.0))
>>> equation_keys(flow).tolist()
[0, 1, 0, 1, 2]
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Jaxpr, Literal
from isoshard.core.runtime.jaxprs import opened

_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
_MARK = re.compile(r"(?<=^gradient:).*|\d+")
"""The part of a name that may differ between layers: their indices, and the module whose output has
this gradient (before the first layer it is no layer)."""
_BY_VALUE = 4096
"""Arrays in parameters are compared by value up to this many bytes, larger ones by identity."""


def equation_keys(
    flow: EquationFlow, *, differentiated: bool = False
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A key for each equation, as an integer; equations that compute the same have equal keys.

    Args:
        flow: of the program. An equation with effects has a key of its own.
        differentiated: the program will be differentiated, so functions with a custom derivative
            are equal only if their rules are the same objects.
    """
    keys = _Keys(differentiated)
    kinds = [keys.aval(aval) for aval in flow.avals]
    literals = [keys.aval(literal.aval) for literal in reversed(flow.literals)]
    kinds += literals  # operands below 0 count from the end
    indices: dict[Hashable, int] = {}
    result = []
    for time, equation in enumerate(flow.equations):
        key: Hashable = time, None
        if not equation.effects:
            key = keys.of(equation), tuple([kinds[operand] for operand in flow.operands[time]])
        result.append(indices.setdefault(key, len(indices)))
    return np.array(result, dtype=np.int64)


class _Keys:
    """Keys of parameters, programs and avals; each object's key is computed once."""

    def __init__(self, differentiated: bool) -> None:
        self._differentiated = differentiated
        self._seen: dict[int, tuple[Any, int]] = {}
        self._parametrized: dict[tuple[int, Any], tuple[Any, int]] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, equation: Any) -> Hashable:
        """The key of an equation, without its operands."""
        params, primitive = equation.params, equation.primitive
        cached = self._parametrized.get((id(params), primitive))
        if cached is None:
            index = self._numbers.setdefault(self._params(equation), len(self._numbers))
            cached = self._parametrized[id(params), primitive] = params, index
        return (
            cached[1],
            tuple([self.aval(variable.aval) for variable in equation.outvars]),
            self._interned(equation.ctx, self._context),
        )

    def _params(self, equation: Any) -> Hashable:
        """The key of an equation's primitive and parameters."""
        name = equation.primitive.name
        params = equation.params
        if name == "slice":
            params = {"strides": params["strides"] or (1,) * len(params["start_indices"])}
        elif name == "name" and not self._differentiated:  # no remat policy reads the name any more
            params = {"name": _MARK.sub("*", params["name"])}
        elif not self._differentiated and name.startswith(_WITH_RULES):
            # Rules for derivatives that will not be taken are left out of the key.
            static_types = ClosedJaxpr | Jaxpr | int | str
            params = {
                key: value for key, value in params.items() if isinstance(value, static_types)
            }
        return (
            equation.primitive,
            tuple([(key, self._value(params[key])) for key in sorted(params)]),
        )

    def aval(self, aval: Any) -> int:
        """The key of a shape and dtype."""
        return self._interned(aval, lambda value: value)

    def _interned(self, value: Any, key: Any) -> int:
        cached = self._seen.get(id(value))
        if cached is None:
            index = self._numbers.setdefault(key(value), len(self._numbers))
            cached = self._seen[id(value)] = value, index
        return cached[1]

    def _context(self, context: Any) -> Hashable:
        names = (
            *("compute_type", "threefry_partitionable", "cur_abstract_mesh"),
            *("remove_size_one_mesh_axis", "xla_metadata"),
        )
        return "context", *[self._value(getattr(context, name, None)) for name in names]

    def _value(self, value: Any) -> Hashable:
        if value is None or type(value) in (bool, int, str):
            return type(value), value
        if type(value) is float:
            return float, repr(value)
        if isinstance(value, ClosedJaxpr):
            return self._interned(value, self._closed)
        if isinstance(value, Jaxpr):
            return self._interned(value, self._program)
        if isinstance(value, tuple | list):
            return type(value), *[self._value(value) for value in value]
        if isinstance(value, dict):
            return dict, *[(self._value(key), self._value(value[key])) for key in value]
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        try:
            hash(value)
        except TypeError:
            return self._interned(value, lambda value: ("object", id(value)))
        return type(value), value

    def _array(self, value: Any) -> Hashable:
        if getattr(value, "nbytes", _BY_VALUE + 1) > _BY_VALUE or value.dtype == object:
            return self._interned(value, lambda value: ("object", id(value)))
        value = np.asarray(value)
        return "array", value.shape, str(value.dtype), value.tobytes()

    def _closed(self, program: ClosedJaxpr) -> Hashable:
        consts = [
            self._array(const)
            if isinstance(const, np.ndarray | np.generic)
            else ("object", id(const))
            for const in program.consts
        ]
        return "closed", self._interned(opened(program), self._program), *consts

    def _program(self, program: Any) -> Hashable:
        indices: dict[Any, int] = {}

        def atom_key(atom: Any) -> Hashable:
            if isinstance(atom, Literal):
                value = np.asarray(atom.val)
                return "literal", value.tobytes(), self.aval(atom.aval)
            return indices[atom]

        def new(variables: Any) -> Hashable:
            for variable in variables:
                indices[variable] = len(indices)
            return tuple([self.aval(variable.aval) for variable in variables])

        key: list[Hashable] = [new(program.constvars), new(program.invars)]
        for equation in program.eqns:
            operands = tuple([atom_key(var) for var in equation.invars])
            position: Hashable = ()
            if equation.primitive.name == "slice":
                position = equation.params["start_indices"]
            key.append((self.of(equation), position, operands))
            new(equation.outvars)
        key.append(tuple([atom_key(var) for var in program.outvars]))
        return "program", *key
