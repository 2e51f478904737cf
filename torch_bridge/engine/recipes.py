"""What entries of a program compute: recipes, interned to integers.

A recipe's number stands in every compile key, so no two recipes ever have one number, whichever
threads make them.

>>> double = Recipe("double", lambda inputs, _scalars, _key: [2 * inputs[0]], 1)
>>> RECIPES[double.number] is double
True
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Recipe:
    """What one kind of tape entry computes.

    Attributes:
        number: its place in `RECIPES`, the part of a compile key.
        name: for error messages and reports.
        run: `(inputs, scalars, key) -> list of arrays`, pure JAX.
        count: how many results it has.
        random: whether it draws random numbers.
        lifted: how many lifted floats it takes.
        detail: what program optimisations may want to know (an operator, or a view chain).
    """

    __slots__ = ("count", "detail", "lifted", "name", "number", "random", "run")

    def __init__(
        self,
        name: str,
        run: Callable[..., Sequence[Any]],
        count: int,
        *,
        random: bool = False,
        lifted: int = 0,
        detail: Any = None,
    ):
        """Register a recipe."""
        self.name = name
        self.run = run
        self.count = count
        self.random = random
        self.lifted = lifted
        self.detail = detail
        with _NUMBERING:
            self.number = len(RECIPES)
            RECIPES.append(self)


RECIPES: list[Recipe] = []
_NUMBERING = threading.Lock()
