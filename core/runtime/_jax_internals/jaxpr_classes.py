"""Traced programs: classes and functions of `jax.extend.core`.

`isoshard.core.runtime.jaxprs` reads and rewrites programs with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    def _bind(name: str, why: str, **options: Any) -> Any:
        return NAMES.bind(f"jax.extend.core.{name}", why=why, **{"without": _TRACED, **options})

    Jaxpr = _bind("Jaxpr", "is the class of a traced program")
    ClosedJaxpr = _bind(
        "ClosedJaxpr",
        "is the class of a traced program with constants, up to JAX 0.10",
        otherwise=Jaxpr,
        without="nothing changes: from JAX 0.11 on it is Jaxpr",
    )
    JaxprEqn = _bind("JaxprEqn", "is the class of an equation")
    Var = _bind("Var", "is the class of a variable")
    Literal = _bind("Literal", "is the class of a constant operand")
    DebugInfo = _bind("DebugInfo", "names a program that isoshard writes")
    Primitive = _bind("Primitive", "is the class of an operation")
    jaxpr_as_fun = _bind("jaxpr_as_fun", "makes a function of a traced program")
    closed_call_p = _bind("primitives.closed_call_p", "is the primitive that calls a program")
