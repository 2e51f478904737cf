"""Ranks that must say the same say it to each other, before they run into a collective.

A rank that has another mesh, or another shape, compiles another program; its collectives then wait
for partners that never come. So whoever lays something out over several processes has them compare
notes first, once per new layout:

    agree("the layout of w", (shape, dtype, str(placements)), ranks=(0, 1))

The lowest of the ranks collects what the others say and tells them the verdict, so a rank speaks
and listens once, whatever their number. Each set of ranks numbers its own agreements: ranks that
have nothing to do with each other need no common order, ranks of one set do. What is compared is
`repr`, with the subject.

A process that is alone agrees with itself:

>>> agree("the mesh", (2, 4))
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from isoshard.core.errors import DistributedError

from . import coordination

_LONGEST = 2000
_rounds: dict[tuple[int, ...], int] = {}
_lock = threading.Lock()


def agree(
    subject: str, value: Any, ranks: Sequence[int] | None = None, *, timeout: float = 60.0
) -> None:
    """Compare `value` between processes; all of `ranks` must call this, in the same order.

    Args:
        subject: what it is about, for the message, e.g. "the mesh of w".
        value: anything whose `repr` says all that must be the same.
        ranks: JAX process numbers that take part; None: all.
        timeout: seconds to wait for the others.

    Raises:
        DistributedError: in every rank: who said what, if they differ; who said nothing, if a rank
            did not come in time (the late one is told when it comes).
    """
    me, size = coordination.rank_and_size()
    team = tuple(sorted({*ranks})) if ranks is not None else tuple(range(size))
    if me not in team:
        raise DistributedError(f"rank {me} asks for an agreement of other ranks, {_list(team)}")
    if team[-1] >= size:
        raise DistributedError(f"there are {size} ranks; an agreement of {_list(team)} has others")
    if len(team) == 1:
        return
    with _lock:
        number = _rounds.get(team, 0)
        _rounds[team] = number + 1
    root = f"agree/{hashlib.sha256(repr(team).encode()).hexdigest()[:16]}"
    room = f"{root}/{number}"
    said = f"{subject}: {_short(repr(value))}"
    coordination.put(f"{room}/{me}", said)
    if me == team[0]:
        verdict = _collect(room, team, said, timeout)
        coordination.put(f"{room}/verdict", verdict or "agreed")
        if not verdict and number:
            coordination.forget(f"{root}/{number - 1}")  # all are in this round: all have left it
    else:
        verdict = _listen(room, team, subject, timeout)
    if verdict:
        raise DistributedError(verdict)


def _collect(room: str, team: tuple[int, ...], mine: str, timeout: float) -> str:
    """What is wrong between the ranks, in words; empty if nothing is."""
    deadline = time.monotonic() + timeout
    said: dict[int, str | None] = {team[0]: mine}
    for rank in team[1:]:
        said[rank] = coordination.take(f"{room}/{rank}", max(0.0, deadline - time.monotonic()))
    missing = [rank for rank in team if said[rank] is None]
    if missing:
        subject = mine.partition(":")[0]
        return _silent(missing, subject, timeout)
    if len({*said.values()}) == 1:
        return ""
    speakers: dict[str, list[int]] = {}
    for rank in team:
        speakers.setdefault(str(said[rank]), []).append(rank)
    lines = "".join(f"\n  {_list(who)}: {what}" for what, who in speakers.items())
    return (
        f"the ranks do not agree:{lines}\n"
        "All of them must lay out the same arrays, over the same mesh, in the same order"
    )


def _listen(room: str, team: tuple[int, ...], subject: str, timeout: float) -> str:
    """The verdict of the first rank; empty if all agree."""
    verdict = coordination.take(f"{room}/verdict", timeout + 1.0)
    if verdict is None and coordination.take(f"{room}/{team[0]}", 0.0) is not None:
        verdict = coordination.take(f"{room}/verdict", timeout + 1.0)  # it came late, and waits
    if verdict is None:
        return _silent([team[0]], subject, timeout)
    return "" if verdict == "agreed" else verdict


def _silent(missing: Sequence[int], subject: str, timeout: float) -> str:
    return (
        f"{_list(missing)} said nothing about {subject} within {timeout:g} s, while the others "
        "wait. A rank that is missing has failed, hangs, or has taken another path: all ranks "
        "must lay out the same arrays in the same order"
    )


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}.. (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _list(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
