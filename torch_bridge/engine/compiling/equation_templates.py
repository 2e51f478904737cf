"""A jaxpr written of templates, each of which is traced once and written as often as it is needed.

>>> writer = TemplateWriter()
>>> x, y = [writer.typed(one) for one in jax.make_jaxpr(lambda x, y: x)(1.0, 2.0).jaxpr.invars]
>>> template = writer.traced(lambda a, b: [jax.numpy.sin(a) * b], [x, y])
>>> [z] = writer.write(template, [x, y])
>>> [z] = writer.write(template, [z, x])
>>> writer.program([x.atom, y.atom], [z.atom])
{ lambda ; a:f32[] b:f32[]. let
    c:f32[] = sin a
    d:f32[] = mul c b
    e:f32[] = sin d
    f:f32[] = mul e a
  in (f,) }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from isoshard.core.repeats.inlined_calls import inlined
from isoshard.core.runtime._jax_internals.jaxpr_classes import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Var,
)
from isoshard.core.runtime.jaxprs import closed, opened, substituted

_NAMES = DebugInfo("isoshard_step", "traced", None, None)


class TracedAtom(NamedTuple):
    """A value of the program that is written.

    Attributes:
        atom: a variable or a literal.
        aval: the number of its shape and dtype.
    """

    atom: Any
    aval: int


class EquationTemplate(NamedTuple):
    """Equations, traced once.

    Attributes:
        inputs: variables.
        equations: in order.
        results: in terms of its variables.
    """

    inputs: Sequence[Any]
    equations: Sequence[JaxprEqn]
    results: Sequence[TracedAtom]


class TemplateWriter:
    """Traces templates, and writes equations.

    Attributes:
        scope: the name scope of what is written.
    """

    def __init__(self) -> None:
        """Nothing is written at first."""
        self.scope = ""
        self._aval_ids: dict[Any, int] = {}
        self._avals: list[Any] = []
        self._written: list[JaxprEqn] = []
        self._traced: list[JaxprEqn] = []
        self._constants: dict[int, tuple[Var, Any]] = {}

    def typed(self, atom: Any) -> TracedAtom:
        """What is known of an atom."""
        index = self._aval_ids.setdefault(atom.aval, len(self._avals))
        if index == len(self._avals):
            self._avals.append(atom.aval)
        return TracedAtom(atom, index)

    def traced(
        self, function: Callable[..., Sequence[Any]], inputs: Sequence[TracedAtom]
    ) -> EquationTemplate:
        """Trace a template."""
        program = inlined(
            jax.make_jaxpr(function)(*[self._struct(input_.aval) for input_ in inputs])
        )
        jaxpr = opened(program)
        names: dict[Any, Any] = {}
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            names[variable], _ = self._constants.setdefault(id(value), (variable, value))
        equations = [eqn.replace(invars=substituted(eqn.invars, names)) for eqn in jaxpr.eqns]
        self._traced += equations
        results = [self.typed(var) for var in substituted(jaxpr.outvars, names)]
        return EquationTemplate(jaxpr.invars, equations, results)

    def write(self, template: EquationTemplate, values: Sequence[TracedAtom]) -> list[TracedAtom]:
        """Write the equations of a template once more, in the scope of `scope`."""
        names = dict(zip(template.inputs, [value.atom for value in values], strict=True))
        for eqn in template.equations:
            read = substituted(eqn.invars, names)
            outvars = [Var(variable.aval) for variable in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            written = eqn.replace(invars=read, outvars=outvars)
            if self.scope:
                source = eqn.source_info
                stack = source.name_stack.extend(self.scope)
                written = written.replace(source_info=source.replace(name_stack=stack))
            self._written.append(written)
        atoms = substituted([result.atom for result in template.results], names)
        return [
            TracedAtom(atom, result.aval)
            for atom, result in zip(atoms, template.results, strict=True)
        ]

    def program(self, inputs: Sequence[Any], results: Sequence[Any]) -> ClosedJaxpr:
        """All that was written."""
        return self._jaxpr(inputs, results, self._written)

    def kinds(self) -> ClosedJaxpr:
        """Every equation that was traced, once; its variables have no meaning."""
        return self._jaxpr((), (), self._traced)

    def _jaxpr(
        self, inputs: Sequence[Any], results: Sequence[Any], equations: list[JaxprEqn]
    ) -> ClosedJaxpr:
        variables = [variable for variable, _ in self._constants.values()]
        effects: Any = frozenset().union(*[eqn.effects for eqn in self._traced])
        jaxpr = Jaxpr(variables, inputs, results, equations, effects, _NAMES)
        return closed(jaxpr, [value for _, value in self._constants.values()])

    def _struct(self, index: int) -> jax.ShapeDtypeStruct:
        aval = self._avals[index]
        layout = getattr(aval, "sharding", None)
        if layout is not None and layout.mesh.empty:
            layout = None
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=layout, weak_type=aval.weak_type
        )
