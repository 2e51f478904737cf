"""A traced program as one platform runs it: of code that depends on it, the branch of that one.

`jax.lax.platform_dependent` puts every branch into the program and lowering drops those of other
platforms. What counts flops and memory before that has to drop them itself.

>>> import jax
>>> def step(x):
...     return jax.lax.platform_dependent(x, cpu=jax.numpy.sin, default=lambda x: x * 2)
>>> program = jax.make_jaxpr(step)(1.0)
>>> [one.primitive.name for one in program.eqns]
['platform_index', 'cond']
>>> call = for_platform(program, "tpu").eqns[-1]
>>> call.primitive.name, call.params["call_jaxpr"].eqns[0].primitive.name
('closed_call', 'mul')
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core.primitives import closed_call_p

_LOWERED = {"gpu": "cuda"}
"""What JAX calls a platform where it lowers for it, if not as a device does."""


def for_platform(program: Any, platform: str) -> Any:
    """The same jaxpr with one branch of what depends on the platform, at any depth.

    Args:
        program: a jaxpr, closed or not.
        platform: of a device, as it says it: "cpu", "gpu" or "tpu".

    Returns:
        A jaxpr of the same kind, which calls the branch. What has none for the platform stays, and
        says so when it is lowered. Nothing of the one given changes.
    """
    return _changed(program, _LOWERED.get(platform, platform))


def _changed(value: Any, platform: str) -> Any:
    if isinstance(value, ClosedJaxpr):
        inner = _changed(value.jaxpr, platform)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, Jaxpr):
        equations = [_equation(one, platform) for one in value.eqns]
        if all(new is old for new, old in zip(equations, value.eqns, strict=True)):
            return value
        return value.replace(eqns=equations)
    if type(value) in (tuple, list) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
        return type(value)(_changed(one, platform) for one in value)
    return value


def _equation(equation: Any, platform: str) -> Any:
    params = {name: _changed(value, platform) for name, value in equation.params.items()}
    if equation.primitive.name == "cond":
        platforms = equation.params.get("branches_platforms") or ()
        for branch, names in zip(params["branches"], platforms, strict=bool(platforms)):
            if names is None or platform in names:
                return equation.replace(
                    primitive=closed_call_p,
                    invars=equation.invars[1:],
                    params={"call_jaxpr": branch},
                    effects=branch.effects,
                )
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)
