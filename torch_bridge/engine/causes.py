"""Why a program was compiled, in words a user can act on."""

from __future__ import annotations

from typing import Any

from isoshard.core import metrics

from . import tape as tapes

_SEEN: list[Any] = []
_KEPT = 64  # plans remembered for comparison


def report(plan: Any, seconds: float) -> None:
    """Tell the metrics about a compilation."""
    cause = _cause(plan)
    _SEEN.append(plan)
    del _SEEN[:-_KEPT]
    what = f"{sum(isinstance(entry[0], int) for entry in plan.program)} operations"
    metrics.record_compilation(what, cause, metrics.user_location(), seconds)


def _cause(plan: Any) -> str:
    """Compare with the most similar plan compiled before."""
    if not _SEEN:
        return "first program"
    names, entries = _names(plan), _entries(plan)
    alike = [earlier for earlier in reversed(_SEEN) if _names(earlier) == names]
    if not alike:
        return "new operations"
    same = [earlier for earlier in alike if _entries(earlier) == entries]
    return _difference(plan, (same or alike)[0])


def _names(plan: Any) -> list[str]:
    return [_name(entry) for entry in _entries(plan)]


def _name(entry: Any) -> str:
    return tapes.RECIPES[entry[0]].name if isinstance(entry[0], int) else "input"


def _entries(plan: Any) -> list[Any]:
    """The entries that say something: not the memory that `.to("jax")` overwrites."""
    return [entry for entry in plan.program if _name(entry) != "empty"]


def _difference(plan: Any, earlier: Any) -> str:
    for new, old in zip(_entries(plan), _entries(earlier), strict=True):
        if new != old:
            if not isinstance(new[0], int):
                return f"new input shape or dtype: {_shape(new)}, before {_shape(old)}"
            if new[0] != old[0]:
                return f"new shape or static argument in {_name(new)}"
            return f"other operands of {_name(new)}"
    if plan.placed != earlier.placed:
        return "new sharding of an input"
    if plan.wanted != earlier.wanted:
        return "new sharding of a result"
    if plan.live != earlier.live:
        return "other results are kept alive"
    return "other inputs may be donated"


def _shape(entry: Any) -> str:
    return f"{entry[1].name}{list(entry[0])}"
