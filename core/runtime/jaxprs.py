"""What is in a traced program, and in the programs inside it.

>>> import jax
>>> looped = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jax.numpy.sin(x), x))
>>> [step.primitive.name for step in equations(looped(1.0))]
['scan', 'add', 'sin']
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def equations(program: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, and of the jaxprs in their parameters.

    Args:
        program: a jaxpr, closed or not.
    """
    for step in program.eqns:
        yield step
        for inside in jaxprs_in_params(step.params):
            yield from equations(inside)
