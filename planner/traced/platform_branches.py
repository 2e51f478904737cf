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
>>> call.params["call_jaxpr"].eqns[0].primitive.name
'mul'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isoshard.core.runtime._jax_internals.jaxpr_classes import closed_call_p
from isoshard.core.runtime.jaxprs import JaxprRewriter

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
    return _OneBranch(_LOWERED.get(platform, platform)).program(program)


class _OneBranch(JaxprRewriter):
    def __init__(self, platform: str) -> None:
        super().__init__()
        self._platform = platform

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        eqn = self.inside(eqn, context)
        if eqn.primitive.name == "cond":
            params = eqn.params
            platforms = params.get("branches_platforms") or ()
            for branch, names in zip(params["branches"], platforms, strict=bool(platforms)):
                if names is None or self._platform in names:
                    yield eqn.replace(
                        primitive=closed_call_p,
                        invars=eqn.invars[1:],
                        params={"call_jaxpr": branch},
                        effects=branch.effects,
                    )
                    return
        yield eqn
