"""Why a program was compiled, in words a user can act on.

Programs with the same operations in the same order are a family. A family that grows and grows,
with another shape each time, is a mistake that costs more than the work itself, so a warning says
so.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any

from isoshard.core.errors import RecompilationWarning
from isoshard.core.runtime import caches, metrics, samples
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge.engine.recording import regions
from isoshard.torch_bridge.engine.recording.recipes import RECIPES

from .dynamic_indices import is_only_moved

_SEEN: list[tuple[Any, int]] = []
_KEPT = 64  # plans remembered for comparison
MANY, LONG = 8, 30.0  # programs of one family, and the seconds they took, that are worth a warning
ENDLESS = 1.0  # the seconds where only a place differs, of which there is always another one


SIMILAR = 0.5
"""Of the operations that two programs share, above which their difference says something."""
_SHOWN = 3


@dataclasses.dataclass
class Family:
    """Programs with the same operations.

    Attributes:
        programs: how many were compiled because of another shape.
        seconds: what that took.
        grown: how many because an input was longer by one.
    """

    programs: int = 0
    seconds: float = 0.0
    grown: int = 0


_SHAPES = ("new input shape", "new shape", "another place")
_PAD = (
    "Every new shape or static argument is another program: pad to a few sizes, keep what grows on "
    "the CPU, or give what changes as a tensor."
)
_GROWS = ", longer by one"
GROWN = 2
"""Programs after the first for inputs that grow by one each time, which is no coincidence then."""
_STATIC = (
    "It grows in every call, and each length is a program: write into memory of the largest size "
    "and mask what is not filled. For keys and values that is a static cache: `generate` takes "
    "one; in a loop of your own take transformers.StaticCache. Or keep what grows on the CPU."
)
_INDEX = (
    "A Python number as the place along an axis that is split over devices is part of the program: "
    "index with a tensor (data[torch.tensor([i])]), split another axis, or let "
    "isoshard.data.loader bring the batches."
)
caches.register("engine: programs to compare", _KEPT, lambda: len(_SEEN), lambda: _SEEN.clear())
_FAMILIES: Bounded[int, Family] = Bounded(PROGRAMS, "engine: families of programs")


def report(plan: Any, seconds: float, cause: str = "") -> None:
    """Tell the metrics about a compilation, and the user if there are too many of its kind.

    Args:
        plan: what was compiled.
        seconds: what that took.
        cause: why, if it is known.
    """
    names = hash(_names(plan))
    family = _FAMILIES.get(names)
    if family is None:
        family = _FAMILIES[names] = Family()
    cause = cause or _cause(plan, names)
    grows = cause.startswith(_SHAPES)
    _SEEN.append((plan, names))
    del _SEEN[:-_KEPT]
    operations = sum(isinstance(entry[0], int) for entry in plan.program)
    where = metrics.user_location()
    region = regions.name()
    what = f"{operations} operations" + (f" of {region}" if region else "")
    metrics.record_compilation(what, cause, where, seconds)
    if plan.donated:
        samples.observe("donated_inputs", len(plan.donated))
    moves = cause.startswith("another place")
    long = ENDLESS if moves else LONG
    short = family.seconds < long or family.programs < MANY
    family.programs += grows
    family.seconds += seconds * grows
    is_longer = cause.endswith(_GROWS)
    family.grown += is_longer
    if is_longer and family.grown == GROWN:
        warnings.warn(
            f"{where}: {family.programs + 1} programs of the same {operations} operations were "
            f"compiled; the last because of: {cause}. {_STATIC}",
            RecompilationWarning,
            stacklevel=2,
        )
    if short and family.programs >= MANY and family.seconds >= long:
        warnings.warn(
            f"{where}: {family.programs} programs of the same {operations} operations were "
            f"compiled in {family.seconds:.0f} s; the last because of: {cause}. "
            f"{_INDEX if moves else _PAD} isoshard.metrics.report() lists them all.",
            RecompilationWarning,
            stacklevel=2,
        )


def _cause(plan: Any, names: int) -> str:
    """Compare with the most similar plan compiled before.

    Args:
        plan: what was compiled.
        names: the hash of its operations' names.
    """
    if plan.moved:
        return "a place that changed: an input from now on"
    if not _SEEN:
        return "first program"
    similar = [earlier for earlier, its in reversed(_SEEN) if its == names]
    if not similar:
        return _new_operations(plan)
    entries = _entries(plan)
    same = [earlier for earlier in similar if _entries(earlier) == entries]
    return _difference(plan, (same or similar)[0])


def _new_operations(plan: Any) -> str:
    """How the operations differ from those of the most similar program."""
    counts = collections.Counter(_names(plan))
    earlier, before, most = None, counts, SIMILAR
    for other, _ in reversed(_SEEN):
        others = collections.Counter(_names(other))
        shared = (others & counts).total() / (others | counts).total()
        if shared > most:
            earlier, before, most = other, others, shared
    if earlier is None:
        return "new operations"
    changes = [
        *[f"{count} {name} more" for name, count in (counts - before).most_common(_SHOWN)],
        *[f"{count} {name} less" for name, count in (before - counts).most_common(_SHOWN)],
    ]
    if not changes:
        pairs = zip(_names(plan), _names(earlier), strict=True)
        index, (now, then) = next(pair for pair in enumerate(pairs) if pair[1][0] != pair[1][1])
        changes = [f"the same in another order, from number {index}: {now}, before {then}"]
    number = sum(isinstance(entry[0], int) for entry in earlier.program)
    return f"new operations; compared with {number} before: {', '.join(changes)}"


def _names(plan: Any) -> tuple[str, ...]:
    return tuple(_name(entry) for entry in _entries(plan))


def _name(entry: Any) -> str:
    return RECIPES[entry[0]].name if isinstance(entry[0], int) else "input"


def _entries(plan: Any) -> list[Any]:
    """The entries that compute something: not the memory that `.to("jax")` overwrites."""
    return [entry for entry in plan.program if _name(entry) != "empty"]


def _difference(plan: Any, earlier: Any) -> str:
    moved = ""
    for new, old in zip(_entries(plan), _entries(earlier), strict=True):
        if new != old:
            if not isinstance(new[0], int):
                longer = _GROWS if _is_longer(new, old) else ""
                return f"new input shape or dtype: {_shape(new)}, before {_shape(old)}{longer}"
            if new[1:] == old[1:] and is_only_moved(RECIPES[new[0]], RECIPES[old[0]]):
                moved = moved or f"another place in {_name(new)}"
                continue
            if new[0] != old[0]:
                return f"new shape or static argument in {_name(new)}"
            return f"other operands of {_name(new)}"
    if moved:
        return moved
    if plan.placed != earlier.placed:
        return "new sharding of an input"
    if plan.result_layouts != earlier.result_layouts:
        return "new sharding of a result"
    if plan.settings != earlier.settings:
        now, before = plan.settings, earlier.settings
        if now.matmul != before.matmul:
            return f"matmul precision {now.matmul}, before {before.matmul}"
        if now.checked != before.checked:
            return "jax_debug_nans or jax_debug_infs was set"
        return f"excess precision {now.excess}, before {before.excess}"
    if plan.live != earlier.live:
        return "other results are kept alive"
    return "other inputs may be donated"


def _is_longer(new: Any, old: Any) -> bool:
    """Whether an input differs from another by one more along one axis."""
    if new[1] != old[1] or len(new[0]) != len(old[0]):
        return False
    return sorted(a - b for a, b in zip(new[0], old[0], strict=True) if a != b) == [1]


def _shape(entry: Any) -> str:
    return f"{entry[1].name}{list(entry[0])}"
