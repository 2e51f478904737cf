"""What a search can be asked for."""

from __future__ import annotations

import typing

from .plan_cost import SearchDepth

_DEPTHS = typing.get_args(SearchDepth)


def check_request(depth: object, candidates: object) -> None:
    """Refuse what a search cannot do, before it begins.

    Args:
        depth: as `search` takes it.
        candidates: likewise.

    Raises:
        ValueError: there is no such depth; or no plan at all is to be found.
    """
    if depth not in _DEPTHS:
        raise ValueError(
            f"depth is {', '.join(map(repr, _DEPTHS))}, not {depth!r}; iso.planner.estimate(step, "
            "args, mesh, found.plan, depth='compile') asks the target's compiler of what is found"
        )
    if not isinstance(candidates, int) or candidates < 1:
        raise ValueError(f"candidates= is how many plans are told, 1 or more, not {candidates!r}")
