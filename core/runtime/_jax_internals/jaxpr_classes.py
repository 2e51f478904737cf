"""Traced programs: classes and functions of `jax.extend.core`.

`isoshard.core.runtime.jaxprs` reads and rewrites programs with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from .declared import NAMES

if TYPE_CHECKING:
    from jax.extend.core import (
        ClosedJaxpr,
        DebugInfo,
        Jaxpr,
        JaxprEqn,
        Literal,
        Primitive,
        Var,
        jaxpr_as_fun,
    )
    from jax.extend.core.primitives import closed_call_p
else:
    _TRACED = "planning, loops of equal layers, `iso.domain` and ONNX export raise"

    @functools.cache
    def _example() -> Any:
        """A traced program of one equation, `x * 2.0`; nothing is computed."""
        return jax.make_jaxpr(lambda x: jax.lax.mul(x, 2.0))(jax.ShapeDtypeStruct((), "float32"))

    def _class(name: str, why: str, part: Callable[[Any], Any], **options: Any) -> Any:
        """A class that is not there by name is that of a part of the example."""
        return NAMES.bind(
            f"jax.extend.core.{name}",
            why=f"is the class of {why}",
            without="nothing changes: it is the class that JAX gives a program, or a part of one",
            make=lambda: type(part(_example())),
            **options,
        )

    def _equation(program: Any) -> Any:
        return program.eqns[0]

    ClosedJaxpr = _class("ClosedJaxpr", "a traced program with constants", lambda p: p)
    Jaxpr = _class("Jaxpr", "a traced program", lambda p: p.jaxpr)
    JaxprEqn = _class("JaxprEqn", "an equation", _equation)
    Var = _class("Var", "a variable", lambda p: _equation(p).invars[0])
    Literal = _class("Literal", "a constant operand", lambda p: _equation(p).invars[1])
    DebugInfo = _class(
        "DebugInfo", "what names a program", lambda p: p.jaxpr.debug_info, versions="0.10 to 0.12"
    )
    Primitive = _class("Primitive", "an operation", lambda p: _equation(p).primitive)
    jaxpr_as_fun = NAMES.bind(
        "jax.extend.core.jaxpr_as_fun", why="makes a function of a traced program", without=_TRACED
    )
    closed_call_p = NAMES.bind(
        "jax.extend.core.primitives.closed_call_p",
        why="is the primitive that calls a program",
        without="planning and exporting programs of which parts are split by hand raise",
    )
