"""A recorded run, cut into a function and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .piece import Piece, cut, needed_slots
from .run_aside import Run, aval_of
from .value import Aval


@dataclasses.dataclass(frozen=True)
class Parts:
    """The two pieces of a run.

    Attributes:
        forward: gives the wanted results, and then what backward needs besides inputs.
        backward: takes the gradients of the differentiable results, the inputs `used`, and what was
            kept; gives the gradients of what is `wanted`, where it `has` one. None if no gradient
            is wanted.
        used: slots of the inputs that backward takes.
        kept: slots of the rest.
        wanted: what has a gradient: numbers of inputs, and of aliases after them.
        has: whether the code's results depend on each of those.
        avals: of the gradients wanted.
    """

    forward: Piece
    backward: Piece | None
    used: tuple[int, ...]
    kept: tuple[int, ...]
    wanted: tuple[int, ...]
    has: tuple[bool, ...]
    avals: tuple[Aval, ...]


def cut_both(
    run: Run,
    given: Sequence[int],
    results: Sequence[int],
    each: Sequence[int] = (),
    *,
    wants: bool,
    recompute: bool = False,
) -> Parts:
    """Cut a run in two.

    Args:
        run: code and its gradient.
        given: slots of what the forward piece takes.
        results: slots of what it gives.
        each: those of `given` that are not at hand any more when backward runs.
        wants: whether a gradient is wanted.
        recompute: whether backward computes again what it can, instead of having it kept.
    """
    if not wants:
        return Parts(cut(run.aside, given, results), None, (), (), (), (), ())
    slots, wanted, avals = [], [], []
    aliases = [alias for _, alias in run.aside.aliases]
    for number, slot in enumerate(run.gradients):
        if number >= len(run.inputs):
            avals.append(aval_of(aliases[number - len(run.inputs)]))
        elif run.wanted[number]:
            avals.append(run.input_avals[number])
        else:
            continue
        wanted.append(number)
        slots.append(slot)
    found = [slot for slot in slots if slot is not None]
    border = 0 if recompute else run.border
    taken, kept = needed_slots(run.aside, found, [*given, *run.given], border)
    used = [slot for slot in taken if slot in given and slot not in each]
    kept = [*(slot for slot in taken if slot in each), *kept]
    return Parts(
        cut(run.aside, given, [*results, *kept]),
        cut(run.aside, [*run.given, *used, *kept], found),
        tuple(used),
        tuple(kept),
        tuple(wanted),
        tuple([slot is not None for slot in slots]),
        tuple(avals),
    )
