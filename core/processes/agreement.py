"""Comparison of arguments between ranks, before they start a collective that would never end.

A rank with another mesh, or another shape, compiles another program, whose collectives wait for
partners that never come. So arguments that are placed over several processes are compared first,
once for each new sharding:

    assert_equal("the layout of w", (shape, dtype, str(placements)), ranks=(0, 1))

It is a `Barrier` (see `coordination`) on the `repr`; of a list of strings the message has those
that differ. Each set of ranks counts its own agreements: ranks of one set make them in one order,
sets without a common rank need none. A single process always agrees with itself:

>>> assert_equal("the mesh", (2, 4))

Some agreements can never complete. A rank that has waited for `PATIENCE` registers so in the
service, and the rank that arrived first looks for two reasons, and ends such agreements:

- Ranks of different sets, as of different meshes, wait for each other: `cycle_through`.
- A rank has arguments that it need not compare: a local tensor instead of a DTensor, a mesh
  without itself, an exchange that was compared before. It does not arrive, and goes on, as its log
  of calls has (`call_log`).
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
_next_index: dict[tuple[int, ...], int] = {}
_lock = threading.Lock()


def assert_equal(
    subject: str, value: Any, ranks: Sequence[int] | None = None, *, timeout: float = 60.0
) -> None:
    """Compare `value` between processes; all of `ranks` must call this, in the same order.

    Args:
        subject: for the message, e.g. "the mesh of w".
        value: anything whose `repr` has all that must be equal; or lines.
        ranks: JAX process indices that take part; None: all.
        timeout: seconds to wait for the others.

    Raises:
        DistributedError: in every rank: the ranks and their values, if they differ; the ranks that
            did not arrive in time (a late rank raises it on arrival).
    """
    rank, ranks = _participants(ranks)
    if len(ranks) > 1:
        _compare(subject, value, ranks, rank, timeout)


def log_call(subject: str, describe: Callable[[], str] | None) -> None:
    """Log a call that compares nothing, but would `assert_equal` with other arguments.

    Args:
        subject: as for `assert_equal`.
        describe: returns this rank's arguments, called if others wait for it; None if they concern
            this rank alone, such as arrays on its own devices.

    Raises:
        DistributedError: others have waited for this rank at an earlier call; with the arguments of
            each.
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
    """Prepare a value in every rank, and compare it before it is used.

    Args:
        subject: for the message.
        prepare: returns the value, without communication; its errors are sent to the other ranks.
        lines: returns the lines that must be equal in all ranks.
        ranks: as for `assert_equal`.

    Raises:
        DistributedError: in every rank, with the lines of each. If all have the same error, that.

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
    """Send an error to ranks that are about to compare with this one.

    They are not waited for long, as they may have compared it before. The result is added to the
    notes of `error`, which the caller raises.
    """
    try:
        rank, ranks = _participants(ranks)
        if len(ranks) > 1:
            _compare(subject, error_lines(error), ranks, rank, 1.5, to_the_end=False)
    except DistributedError as comparison:
        error.add_note(str(comparison))


def error_lines(error: Exception) -> list[str]:
    """The lines that a failed rank compares.

    Example:
        >>> error_lines(ValueError("no rows"))
        ['ValueError: no rows']
    """
    return without_addresses([f"{type(error).__name__}: {' '.join(str(error).split())}"])


def without_addresses(lines: Sequence[str]) -> list[str]:
    """Lines without addresses in memory, which differ between processes.

    Example:
        >>> without_addresses(["<function f at 0x7f12ab>"])
        ['<function f at 0x..>']
    """
    return [re.sub(r"\b0x[0-9a-f]+", "0x..", line) for line in lines]


def _participants(ranks: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """This rank, and the ranks of an agreement."""
    rank, size = coordination.rank_and_size()
    ranks = tuple(sorted({*ranks})) if ranks is not None else tuple(range(size))
    if rank not in ranks:
        raise DistributedError(f"rank {rank} takes no part in an agreement of {_list(ranks)}")
    if ranks[-1] >= size:
        raise DistributedError(
            f"an agreement of {_list(ranks)} needs ranks beyond the {size} of this run"
        )
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
        index = _next_index.get(ranks, 0)
        _next_index[ranks] = index + 1
    agreement = _Agreement(subject, value, ranks, index, rank, timeout, call)
    try:
        text = agreement.wait(to_the_end=to_the_end)
    finally:
        agreement.leave()
    if text.startswith(_ENDED):
        text = _skip_ended(text, rank)
    if text:
        raise DistributedError(text)
    if agreement.all_came and index:
        coordination.delete(_namespace(ranks, index - 1))  # no rank reads it any more


def _raise_ended() -> None:
    """Raise the result of agreements that waited for this rank and were ended."""
    for namespace in call_log.answered():
        result = coordination.get(f"{namespace}/result", 1.0) or ""
        if result.startswith(_ENDED):
            raise DistributedError(_skip_ended(result, coordination.rank_and_size()[0]))


class _Agreement(Barrier):
    """An agreement in one of its ranks."""

    def __init__(
        self,
        subject: str,
        value: Any,
        ranks: tuple[int, ...],
        index: int,
        rank: int,
        timeout: float,
        call: Call | None = None,
    ):
        lines = value if _is_lines(value) else [repr(value)]
        super().__init__(_namespace(ranks, index), ranks, rank, [subject, *lines], timeout)
        self.subject, self.index, self.call = subject, index, call
        self._registered = False

    def explain(self, lines: Lines) -> str:
        """The message: the ranks with lines that not all have, and the ranks without lines."""
        missing = [rank for rank, rank_lines in lines.items() if rank_lines is None]
        by_rank = {rank: rank_lines for rank, rank_lines in lines.items() if rank_lines is not None}
        if self.all_came:
            by_rank |= {rank: [self.subject, "it sent no lines"] for rank in missing}
            missing = []
        common = set.intersection(*(set(rank_lines[1:]) for rank_lines in by_rank.values()))
        text = {
            rank: f"{rank_lines[0]}: {_differing(rank_lines[1:], common)}"
            for rank, rank_lines in by_rank.items()
        }
        differ = len({json.dumps([*rank_lines]) for rank_lines in by_rank.values()}) > 1
        texts = [_message(text)] if differ else []
        return "\n".join(
            texts + ([_missing_message(missing, self.subject, self.timeout)] if missing else [])
        )

    def waits(self) -> None:
        """Put this rank's lines below the namespace."""
        first = self.lines[1] if len(self.lines) > 1 else ""
        text = "; ".join([f"{self.lines[0]}: {first}", *self.lines[2:]])
        coordination.put(f"{self.namespace}/waiting/{self.rank}", _short(text, 500))

    def look(self) -> None:
        """Look for agreements that wait for each other, and for ranks that have passed the call."""
        if not self._registered:
            self._registered = True
            entry = {"number": self.index, "ranks": _spans(self.ranks)}
            coordination.put(f"{_WAITING}/{self.namespace}", json.dumps(entry))
        entries = coordination.get_below(_WAITING)
        waiting = {name: _pending(name, json.loads(entry)) for name, entry in entries.items()}
        cycle = cycle_through(self.namespace, waiting.values())
        # A rank waits until there is a result: so at one moment all of these waited.
        if cycle and not any(
            coordination.get(f"{agreement.namespace}/result") for agreement, _ in cycle
        ):
            text = {
                rank: f"{agreement.waiting[rank]} (of {_list(agreement.ranks)})"
                for agreement, rank in cycle
            }
            self._end(dict(sorted(text.items())), [agreement for agreement, _ in cycle])
        elif self.call is not None and self.namespace in waiting:
            self._query_missing(waiting[self.namespace], self.call)

    def _query_missing(self, pending: Pending, call: Call) -> None:
        """End the agreement if a missing rank has passed the call."""
        passed: dict[int, str] = {}
        for rank in pending.missing[:_MOST]:
            text = call_log.answer_of(rank, call, self.namespace)
            if text is not None:
                passed[rank] = text
        if passed:
            self._end({**pending.waiting, **passed}, [pending])

    def _end(self, text: dict[int, str], agreements: Sequence[Pending]) -> None:
        ended = [[_spans(agreement.ranks), agreement.index] for agreement in agreements]
        result = _ENDED + json.dumps({"message": _message(text), "agreements": ended})
        for agreement in agreements:
            coordination.put_if_absent(f"{agreement.namespace}/result", result)

    def leave(self) -> None:
        """Delete the entry that `look` registered."""
        if self._registered:
            coordination.delete(f"{_WAITING}/{self.namespace}")


def _skip_ended(result: str, rank: int) -> str:
    """Count ended agreements as done, and return their message."""
    ended = json.loads(result.removeprefix(_ENDED))
    for spans, index in ended["agreements"]:
        ranks = _ranks_of(spans)
        if rank in ranks:
            with _lock:
                _next_index[ranks] = max(_next_index.get(ranks, 0), index + 1)
    return str(ended["message"])


def _namespace(ranks: tuple[int, ...], index: int) -> str:
    return f"agree/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{index}"


@dataclasses.dataclass(frozen=True)
class Pending:
    """An agreement in which ranks wait.

    Attributes:
        namespace: of its keys.
        ranks: of the agreement.
        index: among the agreements of these ranks.
        waiting: of the ranks that wait, the lines of each.
    """

    namespace: str
    ranks: tuple[int, ...]
    index: int
    waiting: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        """The ranks that have not arrived, or only now."""
        return [rank for rank in self.ranks if rank not in self.waiting]


def _pending(namespace: str, entry: dict[str, Any]) -> Pending:
    waiting = coordination.get_below(f"{namespace}/waiting")
    lines = {int(rank): text for rank, text in waiting.items()}
    return Pending(namespace, _ranks_of(entry["ranks"]), entry["number"], lines)


def cycle_through(namespace: str, pending: Iterable[Pending]) -> list[tuple[Pending, int]]:
    """The shortest cycle of agreements that wait for each other, starting with `namespace`.

    An agreement waits for another if a rank that it misses waits there. Each has with it such a
    rank, which the agreement before it misses.

    >>> pending = [
    ...     Pending("ab", (0, 1), 0, {0: "the mesh"}),
    ...     Pending("bc", (1, 2), 0, {1: "the mesh"}),
    ...     Pending("ca", (0, 2), 0, {2: "the mesh"}),
    ... ]
    >>> [(agreement.namespace, rank) for agreement, rank in cycle_through("ab", pending)]
    [('ab', 0), ('bc', 1), ('ca', 2)]
    """
    unseen = {agreement.namespace: agreement for agreement in pending}
    start = unseen.pop(namespace, None)
    if start is None:
        return []
    paths = deque([[(start, -1)]])
    while paths:
        path = paths.popleft()
        missing = path[-1][0].missing
        back = [rank for rank in missing if rank in start.waiting]
        if back and len(path) > 1:
            return [(start, back[0]), *path[1:]]
        for agreement in [*unseen.values()]:
            ranks = [rank for rank in missing if rank in agreement.waiting]
            if ranks:
                del unseen[agreement.namespace]
                paths.append([*path, (agreement, ranks[0])])
    return []


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as ranges: the first and last of each."""
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
    """The message for ranks with different texts."""
    by_text: dict[str, list[int]] = {}
    for rank, line in text.items():
        by_text.setdefault(line, []).append(rank)
    shown = itertools.islice(by_text.items(), _MOST)
    lines = "".join(f"\n  {_list(ranks)}: {line}" for line, ranks in shown)
    if len(by_text) > _MOST:
        lines += f"\n  and {len(by_text) - _MOST} groups of ranks with other lines"
    return (
        f"the ranks do not agree:{lines}\n"
        "All ranks must shard the same arrays, over the same mesh, in the same order"
    )


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _differing(lines: Sequence[str], common: set[str]) -> str:
    """The lines of a rank that not all ranks have; all lines, if only their order differs."""
    differing = [line for line in lines if line not in common] or [*lines]
    return listed([*map(_short, differing)], _MOST_LINES, "; ")


def _missing_message(missing: Sequence[int], subject: str, timeout: float) -> str:
    return (
        f"{_list(missing)} sent nothing about {subject} within {timeout:g} s, while the others "
        "wait. A missing rank has failed, hangs, or has taken another path: all ranks must shard "
        "the same arrays in the same order"
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
