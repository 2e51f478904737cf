"""Many events of a timeline as few, for pictures: neighbours together, then stretches of them.

>>> many = [TimelineEvent("compute", (), float(at), 1.0, at, "a.py:1 (f)") for at in range(1000)]
>>> [(event.seconds, event.memory) for event in grouped(many)]
[(1000.0, 999)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..reports.report import TimelineEvent

MOST = 200
"""Events of a timeline."""


def grouped(events: Iterable[TimelineEvent], most: int = MOST) -> tuple[TimelineEvent, ...]:
    """Make a timeline short.

    Neighbours of one kind, along the same axes and of one line, become one. If they are still too
    many, stretches of it are grouped: in each, all of one kind along the same axes become one, with
    the line that most of it comes from.

    Args:
        events: in order.
        most: how many there may be at the end.

    Returns:
        Events in order that take as long together as those given.
    """
    short = _neighbours(events)
    length = 2
    stretched = short
    while len(stretched) > most and length < 2 * len(short):
        stretched = [
            event
            for start in range(0, len(short), length)
            for event in _stretch(short[start : start + length])
        ]
        length *= 2
    return _started(stretched)


def _neighbours(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    short: list[TimelineEvent] = []
    for event in events:
        if short and _key(short[-1]) == _key(event) and short[-1].line == event.line:
            short[-1] = _together([short[-1], event])
        else:
            short.append(event)
    return short


def _stretch(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    stretch: dict[tuple[str, tuple[str, ...]], list[TimelineEvent]] = {}
    for event in events:
        stretch.setdefault(_key(event), []).append(event)
    return [_together(same) for same in stretch.values()]


def _together(events: Sequence[TimelineEvent]) -> TimelineEvent:
    by_line: dict[str, float] = {}
    for event in events:
        by_line[event.line] = by_line.get(event.line, 0.0) + event.seconds
    first = events[0]
    return TimelineEvent(
        first.what,
        first.axes,
        first.start,
        sum(event.seconds for event in events),
        max(event.memory for event in events),
        max(by_line, key=by_line.__getitem__),
    )


def _started(events: Iterable[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """The events one after the other."""
    at, placed = 0.0, []
    for event in events:
        placed.append(
            TimelineEvent(event.what, event.axes, at, event.seconds, event.memory, event.line)
        )
        at += event.seconds
    return tuple(placed)


def _key(event: TimelineEvent) -> tuple[str, tuple[str, ...]]:
    return event.what, event.axes
