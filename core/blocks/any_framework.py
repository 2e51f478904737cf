"""Verbs that take arrays of a framework as well: `iso.domain.knn(points, queries, 17)` of tensors.

The verb is written for JAX. Where an argument belongs to a framework with a bridge, the framework
calls it (`Framework.call`), as it calls any JAX function, and passes the shardings of its arrays.

>>> @any_framework
... def double(x):
...     return x + x
>>> double(2)
4
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from isoshard.core.frameworks import framework_of

from .any_mesh import any_mesh

Params = ParamSpec("Params")
Result = TypeVar("Result")

_OURS = (jax.Array, np.ndarray, np.generic, int, float, complex, str, bool)


def any_framework(verb: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let a verb take arrays of other frameworks, and those on meshes of every axis type."""

    of_arrays = any_mesh(verb)

    @functools.wraps(verb)
    def called(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        for leaf in jax.tree.leaves((args, kwargs)):
            framework = None if isinstance(leaf, _OURS) else framework_of(leaf)
            if framework is not None:
                return framework.call(verb, args, kwargs)
        return of_arrays(*args, **kwargs)

    return called
