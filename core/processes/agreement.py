"""Ranks compare what they are given, before they run into a collective that never ends.

A rank with another mesh, or another shape, compiles another program, whose collectives wait for
partners that never come. So whatever is placed over several processes is compared first, once for
each new sharding:

    assert_equal("the layout of w", (shape, dtype, str(placements)), ranks=(0, 1))

It is a `Barrier` (see `coordination`) on the `repr`; of a list of strings the message has those
that differ. Each set of ranks numbers its own agreements: ranks of one set make them in one order,
sets without a common rank need none. A process that is alone agrees with itself:

>>> assert_equal("the mesh", (2, 4))

Some agreements can never come about. A rank that has waited for `PATIENCE` says so in the service,
and the rank that came first looks for two reasons, and ends what it finds:

- Ranks that mean different sets, as of different meshes, wait for each other: `cycle_through`.
- A rank was given something that it need not compare: a tensor of its own for a DTensor, a mesh
  without itself, an exchange that was compared before. It does not come, and goes on; its log of
  calls tells (`call_log`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from isoshard.core.errors import DistributedError
from isoshard.core.runtime.formatting import listed

from . import call_log, coordination
from .call_log import Call
from .coordination import Barrier, Lines

T = TypeVar("T")

_LONGEST = 2000
_MOST_LINES = 8
_MOST = 16  # ranks, or groups of them, that are named one by one
_WAITING = "waits"  # prefix of a key for each agreement in which ranks wait
_ENDED = "ended "
_numbers: dict[tuple[int, ...], int] = {}
_lock = threading.Lock()


def assert_equal(
    subject: str, value: Any, ranks: Sequence[int] | None = None, *, timeout: float = 60.0
) -> None:
    """Compare `value` between processes; all of `ranks` must call this, in the same order.

    Args:
        subject: what it is about, for the message, e.g. "the mesh of w".
        value: anything whose `repr` has all that must be equal; or lines.
        ranks: JAX process indices that take part; None: all.
        timeout: seconds to wait for the others.

    Raises:
        DistributedError: in every rank: which rank has what, if they differ; which ranks did not
            come in time (a late one raises it when it comes).
    """
    rank, ranks = _taking_part(ranks)
    if len(ranks) > 1:
        _compare(subject, value, ranks, rank, timeout)


def log_call(subject: str, describe: Callable[[], str] | None) -> None:
    """Log a call that compares nothing, where other arguments would have it `assert_equal`.

    Args:
        subject: as for `assert_equal`.
        describe: what this rank was given, called if others wait for it; None if that concerns this
            rank alone, such as arrays on its own devices.

    Raises:
        DistributedError: others have waited for this rank at an earlier call: who was given what.
    """
    if coordination.rank_and_size()[1] > 1:
        _raise_ended()
        call_log.enter(subject, describe)


def prepare_equal(
    subject: str,
    prepare: Callable[[], T],
    lines: Callable[[T], list[str]],
    ranks: Sequence[int] | None = None,
) -> T:
    """Prepare something in every rank, and compare it before it is used.

    Args:
        subject: what it is, for the message.
        prepare: makes it, without the other ranks; they are told of an error.
        lines: what of it must be equal in all ranks.
        ranks: as for `assert_equal`.

    Raises:
        DistributedError: in every rank: who has what. If all have the same error, that.

    Example:
        >>> prepare_equal("the batch", lambda: [1, 2], lambda rows: [f"{len(rows)} rows"])
        [1, 2]
    """
    try:
        result = prepare()
        text = lines(result)
    except Exception as error:
        assert_equal(subject, error_lines(error), ranks)
        raise
    assert_equal(subject, without_addresses(text), ranks)
    return result


def report_error(subject: str, error: Exception, ranks: Sequence[int] | None = None) -> None:
    """Tell ranks that are about to compare something that this one has failed.

    They are not waited for long, as they may have compared it before. What comes of it is added to
    the notes of `error`, which the caller raises.
    """
    try:
        rank, ranks = _taking_part(ranks)
        if len(ranks) > 1:
            _compare(subject, error_lines(error), ranks, rank, 1.5, to_the_end=False)
    except DistributedError as comparison:
        error.add_note(str(comparison))


def error_lines(error: Exception) -> list[str]:
    """What a rank that has failed compares.

    Example:
        >>> error_lines(ValueError("no rows"))
        ['ValueError: no rows']
    """
    return without_addresses([f"{type(error).__name__}: {' '.join(str(error).split())}"])


def without_addresses(lines: Sequence[str]) -> list[str]:
    """The same lines without addresses in memory, which differ between processes.

    Example:
        >>> without_addresses(["<function f at 0x7f12ab>"])
        ['<function f at 0x..>']
    """
    return [re.sub(r"\b0x[0-9a-f]+", "0x..", line) for line in lines]


def _taking_part(ranks: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """This rank, and those that take part."""
    rank, size = coordination.rank_and_size()
    ranks = tuple(sorted({*ranks})) if ranks is not None else tuple(range(size))
    if rank not in ranks:
        raise DistributedError(f"rank {rank} asks for an agreement of other ranks, {_list(ranks)}")
    if ranks[-1] >= size:
        raise DistributedError(f"there are {size} ranks; an agreement of {_list(ranks)} has others")
    return rank, ranks


def _compare(
    subject: str,
    value: Any,
    ranks: tuple[int, ...],
    rank: int,
    timeout: float,
    *,
    to_the_end: bool = True,
) -> None:
    _raise_ended()
    call = call_log.enter(subject, None)
    with _lock:
        number = _numbers.get(ranks, 0)
        _numbers[ranks] = number + 1
    agreement = _Agreement(subject, value, ranks, number, rank, timeout, call)
    try:
        text = agreement.wait(to_the_end=to_the_end)
    finally:
        agreement.leave()
    if text.startswith(_ENDED):
        text = _skip_ended(text, rank)
    if text:
        raise DistributedError(text)
    if agreement.all_came and number:
        coordination.delete(_namespace(ranks, number - 1))  # all have left it


def _raise_ended() -> None:
    """Raise what became of agreements in which this rank was waited for."""
    for namespace in call_log.answered():
        result = coordination.get(f"{namespace}/verdict", 1.0) or ""
        if result.startswith(_ENDED):
            raise DistributedError(_skip_ended(result, coordination.rank_and_size()[0]))


class _Agreement(Barrier):
    """One agreement, as one of its ranks takes part in it."""

    def __init__(
        self,
        subject: str,
        value: Any,
        ranks: tuple[int, ...],
        number: int,
        rank: int,
        timeout: float,
        call: Call | None = None,
    ):
        lines = value if _is_lines(value) else [repr(value)]
        super().__init__(_namespace(ranks, number), ranks, rank, [subject, *lines], timeout)
        self.subject, self.number, self.call = subject, number, call
        self._registered = False

    def explain(self, lines: Lines) -> str:
        """Which ranks have which lines that not all have; which have sent none."""
        silent = [rank for rank, sent in lines.items() if sent is None]
        by_rank = {rank: sent for rank, sent in lines.items() if sent is not None}
        if self.all_came:
            by_rank |= {rank: [self.subject, "it said no more"] for rank in silent}
            silent = []
        common = set.intersection(*(set(sent[1:]) for sent in by_rank.values()))
        text = {rank: f"{sent[0]}: {_own(sent[1:], common)}" for rank, sent in by_rank.items()}
        differ = len({json.dumps([*sent]) for sent in by_rank.values()}) > 1
        texts = [_message(text)] if differ else []
        return "\n".join(texts + ([_silent(silent, self.subject, self.timeout)] if silent else []))

    def waits(self) -> None:
        """Put this rank's lines below the namespace."""
        first = self.lines[1] if len(self.lines) > 1 else ""
        text = "; ".join([f"{self.lines[0]}: {first}", *self.lines[2:]])
        coordination.put(f"{self.namespace}/here/{self.rank}", _short(text, 500))

    def look(self) -> None:
        """Look for agreements that wait for each other, and for ranks that have passed by."""
        if not self._registered:
            self._registered = True
            entry = {"number": self.number, "team": _spans(self.ranks)}
            coordination.put(f"{_WAITING}/{self.namespace}", json.dumps(entry))
        entries = coordination.get_below(_WAITING)
        waiting = {name: _pending(name, json.loads(entry)) for name, entry in entries.items()}
        cycle = cycle_through(self.namespace, waiting.values())
        # A rank that waits stays until there is a result: so at one moment all of these waited.
        if cycle and not any(coordination.get(f"{one.namespace}/verdict") for one, _ in cycle):
            text = {rank: f"{one.here[rank]} (of {_list(one.ranks)})" for one, rank in cycle}
            self._end(dict(sorted(text.items())), [one for one, _ in cycle])
        elif self.call is not None and self.namespace in waiting:
            self._ask_missing(waiting[self.namespace], self.call)

    def _ask_missing(self, pending: Pending, call: Call) -> None:
        """End the agreement if a rank that is missing has passed by."""
        passed: dict[int, str] = {}
        for rank in pending.missing[:_MOST]:
            text = call_log.answer_of(rank, call, self.namespace)
            if text is not None:
                passed[rank] = text
        if passed:
            self._end({**pending.here, **passed}, [pending])

    def _end(self, text: dict[int, str], agreements: Sequence[Pending]) -> None:
        rooms = [[_spans(one.ranks), one.number] for one in agreements]
        result = _ENDED + json.dumps({"told": _message(text), "rooms": rooms})
        for one in agreements:
            coordination.put_if_absent(f"{one.namespace}/verdict", result)

    def leave(self) -> None:
        """Delete what `look` left for others."""
        if self._registered:
            coordination.delete(f"{_WAITING}/{self.namespace}")


def _skip_ended(result: str, rank: int) -> str:
    """Count agreements that were ended as done; the message of those."""
    ended = json.loads(result.removeprefix(_ENDED))
    for spans, number in ended["rooms"]:
        ranks = _ranks_of(spans)
        if rank in ranks:
            with _lock:
                _numbers[ranks] = max(_numbers.get(ranks, 0), number + 1)
    return str(ended["told"])


def _namespace(ranks: tuple[int, ...], number: int) -> str:
    return f"agree/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{number}"


@dataclasses.dataclass(frozen=True)
class Pending:
    """An agreement in which ranks wait.

    Attributes:
        namespace: of its keys.
        ranks: all that are to come.
        number: among the agreements of these ranks.
        here: of the ranks that wait, the lines of each.
    """

    namespace: str
    ranks: tuple[int, ...]
    number: int
    here: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come, or not long ago."""
        return [rank for rank in self.ranks if rank not in self.here]


def _pending(namespace: str, entry: dict[str, Any]) -> Pending:
    here = coordination.get_below(f"{namespace}/here")
    lines = {int(rank): text for rank, text in here.items()}
    return Pending(namespace, _ranks_of(entry["team"]), entry["number"], lines)


def cycle_through(namespace: str, pending: Iterable[Pending]) -> list[tuple[Pending, int]]:
    """The shortest cycle of agreements that wait for each other, from one on.

    An agreement waits for another one if a rank that it misses waits there. Each comes with such a
    rank, which the one before it misses.

    >>> pending = [
    ...     Pending("ab", (0, 1), 0, {0: "the mesh"}),
    ...     Pending("bc", (1, 2), 0, {1: "the mesh"}),
    ...     Pending("ca", (0, 2), 0, {2: "the mesh"}),
    ... ]
    >>> [(one.namespace, rank) for one, rank in cycle_through("ab", pending)]
    [('ab', 0), ('bc', 1), ('ca', 2)]
    """
    unseen = {one.namespace: one for one in pending}
    start = unseen.pop(namespace, None)
    if start is None:
        return []
    paths = deque([[(start, -1)]])
    while paths:
        path = paths.popleft()
        missing = path[-1][0].missing
        back = [rank for rank in missing if rank in start.here]
        if back and len(path) > 1:
            return [(start, back[0]), *path[1:]]
        for one in [*unseen.values()]:
            ranks = [rank for rank in missing if rank in one.here]
            if ranks:
                del unseen[one.namespace]
                paths.append([*path, (one, ranks[0])])
    return []


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks, ascending, as first and last of those that follow each other."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def _ranks_of(spans: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(rank for start, end in spans for rank in range(start, end + 1))


def _message(text: dict[int, str]) -> str:
    """The message, where not all ranks have the same text."""
    by_text: dict[str, list[int]] = {}
    for rank, mine in text.items():
        by_text.setdefault(mine, []).append(rank)
    shown = itertools.islice(by_text.items(), _MOST)
    lines = "".join(f"\n  {_list(ranks)}: {mine}" for mine, ranks in shown)
    if len(by_text) > _MOST:
        lines += f"\n  and {len(by_text) - _MOST} groups of ranks say yet other things"
    return (
        f"the ranks do not agree:{lines}\n"
        "All of them must lay out the same arrays, over the same mesh, in the same order"
    )


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _own(lines: Sequence[str], common: set[str]) -> str:
    """The lines of a rank that not all have; all, if only their order differs."""
    own = [line for line in lines if line not in common] or [*lines]
    return listed([*map(_short, own)], _MOST_LINES, "; ")


def _silent(missing: Sequence[int], subject: str, timeout: float) -> str:
    return (
        f"{_list(missing)} said nothing about {subject} within {timeout:g} s, while the others "
        "wait. A rank that is missing has failed, hangs, or has taken another path: all ranks "
        "must lay out the same arrays in the same order"
    )


def _short(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}.. (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    spans = _spans(ranks)
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:_MOST]]
    return f"ranks {', '.join(shown)}{', ..' * (len(spans) > _MOST)}"
