"""What entries of a program compute: recipes, interned to integers.

A recipe's number is part of every compile key, so no two recipes ever have one number, whichever
threads make them, and none gets the number of one that is gone.

A program whose shapes, slices or constants never end must not fill the memory, so a recipe lives
only as long as it has a reference:

- the signature of a call, of which each operator keeps the `bounded.CALLS` used last;
- a view chain, as long as a tensor, a chain that goes on from it, or one of the `bounded.CALLS`
  view calls that each operator keeps, holds it;
- what was recorded and not executed yet, and each of the `bounded.PROGRAMS` compiled programs that
  are kept in memory.

The last means that what a kept program was made of is found again, however long ago it was used,
and so the program is. `Aval`s and chains are interned weakly: while one is alive it is the only
one.

>>> double = Recipe("double", lambda inputs, _scalars, _key: [2 * inputs[0]], 1)
>>> RECIPES[double.id] is double
True
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from isoshard.core.runtime import metrics

Check = Callable[[Sequence[Any]], None]
"""Refuses some lifted floats."""


class Recipe:
    """What one kind of tape entry computes.

    Attributes:
        id: its place in `RECIPES`, the part of a compile key.
        name: for error messages and reports.
        run: `(inputs, scalars, key) -> list of arrays`, pure JAX.
        count: how many results it has.
        random: whether it draws random numbers.
        lifted: how many lifted floats it takes.
        detail: what program optimisations may read (an operator, or a view chain).
        call: what leads to this recipe, kept alive by it; see `Interned`.
        check: rejects lifted floats, at each call; None where any is accepted.
        line: of the user code that needed it first.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "check",
        "count",
        "detail",
        "id",
        "lifted",
        "line",
        "name",
        "random",
        "run",
    )

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
        self.call: Any = None
        self.check: Check | None = None
        self.line = metrics.user_location()
        self.id = next(_IDS)
        RECIPES[self.id] = self


RECIPES: weakref.WeakValueDictionary[int, Recipe] = weakref.WeakValueDictionary()
_IDS = itertools.count()
