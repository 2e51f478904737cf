"""Process groups over the key-value service of JAX's coordination service.

The service is on rank 0's machine and serves all ranks. `put`, `get`, `increment`, .. are one
request each; `metrics` counts this process's requests ("store.requests") and their bytes
("store.bytes"). Only this module uses JAX's client of it, which has no public name
(`core/runtime/_jax_internals`). Nothing here is a collective of devices, so a group may work in a
thread alongside a training step.

An exchange costs each rank the same number of requests, however many ranks there are:

- `Barrier`: ranks wait for each other, and compare their lines. Three requests.
- `ProcessGroup`: ranks run a function together, and an error of one is raised in all. A group
  exchanges through a `Transport`: this service, or `torch.distributed`.

>>> ProcessGroup().broadcast(lambda: "a group of one process")
'a group of one process'

Without `iso.distributed.init_distributed`, or `jax.distributed.initialize`, there is no service:

>>> put("a", "b")
Traceback (most recent call last):
    ...
isoshard.core.errors.DistributedError: the processes are not connected yet; call iso.distributed.init_distributed() first
"""  # noqa: E501

from __future__ import annotations

import abc
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from isoshard.core.errors import CheckpointError, DistributedError
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals import (
    devices_have_started,
    distributed_state,
    is_distributed,
)

T = TypeVar("T")

PATIENCE = 0.4
"""Seconds after which a rank that waits at a barrier registers where."""
TIMEOUT = 3600.0
"""Seconds that the processes of a group wait for each other."""

_PREFIX = "isoshard/"
_EQUAL, _SEND_LINES = "equal", "send lines"
_SENDING = 10.0  # seconds for a rank at a barrier to send its lines; it does nothing else meanwhile
_SENDING_LATE = 1.0  # the same for ranks that may not have arrived
_MOST = 16  # processes whose errors are in a message
_groups = itertools.count()
_groups_of: dict[str, itertools.count[int]] = {}


def is_started() -> bool:
    """Whether JAX's distributed runtime runs in this process.

    Example:
        >>> is_started()
        False
    """
    return is_distributed()


def backend_runs() -> bool:
    """Whether JAX has started its devices, after which processes cannot be connected."""
    return devices_have_started()


def address() -> str | None:
    """Host and port of the coordination service, if JAX has them."""
    return getattr(distributed_state, "coordinator_address", None)


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and the number of processes; does not start the devices."""
    if not is_distributed():
        return 0, 1
    return distributed_state.process_id, distributed_state.num_processes


def keep_preemption(keep: bool) -> None:
    """Configure whether JAX starts its preemption service, which catches SIGTERM.

    `jax_enable_preemption_service` is an option of jax 0.9 and later; one without it has none.
    """
    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", keep)


def put(key: str, value: str) -> None:
    """Set a key that has no value.

    Raises:
        DistributedError: there is no coordination service, or it is gone, or the key has a value.
    """
    if not put_if_absent(key, value):
        raise DistributedError(f"the coordination service has a value of {key!r} already")


def put_if_absent(key: str, value: str) -> bool:
    """Set a key unless it has another value; True if it has this value now."""
    client = _client()
    _record(key, value)
    try:
        client.key_value_set(_PREFIX + key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise DistributedError(f"the coordination service did not take {key!r}: {error}") from None
    return True


def increment(key: str, by: int = 1) -> int:
    """Add to the integer of a key, at first 0, and return the sum. `by=0` reads it.

    The key is not one of `put`.
    """
    client = _client()
    _record(key, "8 bytes.")
    try:
        return client.key_value_increment(_PREFIX + key, by)
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"the coordination service did not count {key!r}: {error}") from None


def get(key: str, timeout: float | None = None) -> str | None:
    """The value of a key.

    Args:
        key: of `put`.
        timeout: seconds to wait until it is set; None does not wait.

    Returns:
        The value; None if there is none in time.

    Raises:
        DistributedError: there is no coordination service, or it is gone.
    """
    client, name = _client(), _PREFIX + key
    try:
        if timeout is None:
            value = client.key_value_try_get(name)
        else:
            value = client.blocking_key_value_get(name, max(1, int(timeout * 1000)))
    except jax.errors.JaxRuntimeError as error:
        _record(key, "")
        if ("NOT_FOUND" if timeout is None else "DEADLINE_EXCEEDED") in str(error):
            return None
        raise DistributedError(f"the coordination service did not answer: {error}") from None
    _record(key, value)
    return value


def get_below(key: str) -> dict[str, str]:
    """The values of all keys "KEY/..", by what follows "KEY/", in one request."""
    client, start = _client(), f"{_PREFIX}{key}/"
    try:
        pairs = client.key_value_dir_get(start)
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"the coordination service did not answer: {error}") from None
    _record(key, "".join(value for _, value in pairs))
    return {name.removeprefix(start): value for name, value in pairs}


def delete(key: str) -> None:
    """Remove a key and all keys below it."""
    _record(key, "")
    _client().key_value_delete(_PREFIX + key)


def arrive(key: str, rank: int, size: int, value: str) -> bool:
    """Put a rank's value below `key`; True if this rank is the last of `size` to do so."""
    put(f"{key}/values/{rank}", value)
    return increment(f"{key}/came") == size


def values(key: str) -> dict[int, str]:
    """The values that ranks have put by `arrive`, in one request."""
    return {int(rank): value for rank, value in get_below(f"{key}/values").items()}


def _record(key: str, value: str) -> None:
    metrics.count("store.requests")
    metrics.count("store.bytes", len(_PREFIX) + len(key.encode()) + len(value.encode()))


def _client() -> Any:
    client = distributed_state.client
    if client is None:
        raise DistributedError(
            "the processes are not connected yet; call iso.distributed.init_distributed() first"
        )
    return client


Lines = Mapping[int, Sequence[str] | None]
"""The lines of each rank; None if it sent none."""


class Barrier(abc.ABC):
    """A barrier at which ranks compare lines.

    Equal lines are never read: a rank increments the counter of a digest of its lines, then that of
    arrived ranks. The last rank compares the two counters, and puts the result that the others wait
    for:

        agree/1f0c../7/lines_of/9b1e..  4      ranks with these lines
        agree/1f0c../7/came             4      ranks that arrived
        agree/1f0c../7/result           equal

    So a rank makes three requests, the last rank four or five, of some hundred bytes. If the lines
    differ, or a rank does not arrive in time, all send theirs; the rank that has noticed, the last
    one or the first to time out, reads them and puts the message that `explain` returns.

    Args:
        namespace: of the keys; the same in all of these ranks, and of no other barrier.
        ranks: ascending.
        rank: this one.
        lines: of this rank.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, namespace: str, ranks: Sequence[int], rank: int, lines: Sequence[str], timeout: float
    ):
        """See the class."""
        self.namespace, self.ranks, self.rank = namespace, ranks, rank
        self.lines, self.timeout = lines, timeout
        self.all_came = False  # as far as this rank knows

    @abc.abstractmethod
    def explain(self, lines: Lines) -> str:
        """The message for all about lines that differ or are missing; called in one rank."""

    def waits(self) -> None:  # noqa: B027 - it may be left out
        """Called once, when the others have not arrived for `PATIENCE`."""

    def look(self) -> None:  # noqa: B027 - likewise
        """Called in the rank that arrived first, each time that `PATIENCE` has passed."""

    def wait(self, *, to_the_end: bool = True) -> str:
        """Wait for the other ranks.

        Args:
            to_the_end: False leaves when the time is over, instead of ending the barrier for all;
                the others will have this rank's lines.

        Returns:
            "" if all lines are equal; else the message of `explain`, or a result that another rank
            put meanwhile.
        """
        came, key = self._come(), f"{self.namespace}/result"
        self.all_came = came == len(self.ranks)
        if not self.all_came:
            result = self._result(key, first=came == 1)
            if result is not None:
                return self._follow(result)
            if not to_the_end:
                self._send()
                return f"not all of {len(self.ranks)} ranks arrived within {self.timeout:g} s"
        equal = self.all_came and self._all_equal()
        if not put_if_absent(key, _EQUAL if equal else _SEND_LINES):
            return self._follow(get(key, 1.0))
        return "" if equal else self._collect()

    def _come(self) -> int:
        """Count this rank, and return how many have arrived."""
        text = json.dumps([*self.lines]).encode()
        self._digest = f"{self.namespace}/lines_of/{hashlib.sha256(text).hexdigest()[:32]}"
        self._same_lines = increment(self._digest)
        return increment(f"{self.namespace}/came")

    def _all_equal(self) -> bool:
        """Whether all lines are equal; called when all have arrived, so all have counted theirs."""
        size = len(self.ranks)
        return self._same_lines == size or increment(self._digest, 0) == size

    def _result(self, key: str, *, first: bool) -> str | None:
        """The result; None if no rank put one in time."""
        end = time.monotonic() + self.timeout
        result = get(key, min(PATIENCE, self.timeout))
        if result is None:
            self.waits()
        while result is None and (left := end - time.monotonic()) > 0:
            if first:
                self.look()
            result = get(key, min(PATIENCE, left) if first else left)
        return result

    def _follow(self, result: str | None) -> str:
        if result == _EQUAL:
            return ""
        if result != _SEND_LINES:
            return result or f"the lines of {self.namespace} were deleted meanwhile"
        self._send()
        text = get(f"{self.namespace}/message", 2 * _SENDING)
        if text is None:
            return "the ranks do not agree, and the rank that was to send the message has ended"
        return "" if text == _EQUAL else text

    def _collect(self) -> str:
        """Read the lines of all, and put the message about them."""
        self._send()
        end = time.monotonic() + (_SENDING if self.all_came else _SENDING_LATE)
        lines: dict[int, Sequence[str] | None] = {}
        for rank in self.ranks:
            key, left = f"{self.namespace}/lines/{rank}", end - time.monotonic()
            text = get(key, left if left > 0 else None)
            lines[rank] = None if text is None else json.loads(text)
        text = self.explain(lines)  # "" if the last rank arrived just at the timeout
        put(f"{self.namespace}/message", text or _EQUAL)
        return text

    def _send(self) -> None:
        put(f"{self.namespace}/lines/{self.rank}", json.dumps([*self.lines]))


class Transport(Protocol):
    """The exchange of results between the processes of a group; an error is "" if there is none."""

    def barrier(self, error: str) -> str:
        """Wait for all, and return the errors of any, or ""."""
        ...

    def gather(self, error: str, value: Any, everywhere: bool) -> tuple[str, list[Any]]:
        """Like `barrier`, with the values of all: in the first process, or in each."""
        ...

    def broadcast(self, error: str, value: Any) -> tuple[str, Any]:
        """The error of the first process, and its value."""
        ...


class ProcessGroup:
    """Processes that run functions together; usually a single one.

    All make the same calls in the same order, and go on only if all succeed: an error in one raises
    a `CheckpointError` in the others, with its text, and so does a process that does not arrive
    within `TIMEOUT`.

    Args:
        rank: of this process in the group.
        size: number of processes.
        transport: needed where there are several.
    """

    def __init__(self, rank: int = 0, size: int = 1, transport: Transport | None = None):
        """See the class."""
        self.rank, self.size = rank, size
        self._transport = transport

    @classmethod
    def world(cls) -> ProcessGroup:
        """All processes; each calls this as often as the others, in the same order."""
        rank, size = rank_and_size()
        return cls(rank, size, ServiceTransport(rank, range(size), f"group/{next(_groups)}"))

    @classmethod
    def of(cls, ranks: Sequence[int]) -> ProcessGroup:
        """Some processes, ascending; each of them calls this as often as the others."""
        key = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        namespace = f"group/{key}/{next(_groups_of.setdefault(key, itertools.count()))}"
        rank = rank_and_size()[0]
        return cls(ranks.index(rank), len(ranks), ServiceTransport(rank, ranks, namespace))

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in every process, and return this one's result."""
        if self._transport is None or self.size == 1:
            return work()
        result, error = _outcome(work)
        return _checked(result, error, self._transport.barrier(_text(error)))

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` in every process, and return the results of all in the first, by rank."""
        return self._gathered(work, everywhere=False)

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` in every process, and return the results of all in each, by rank."""
        return self._gathered(work, everywhere=True)

    def broadcast(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process, and return its result in all."""
        if self._transport is None or self.size == 1:
            return work()
        result, error = _outcome(work) if self.rank == 0 else (None, None)
        failures, result = self._transport.broadcast(_text(error), result)
        return _checked(result, error, failures)

    def _gathered(self, work: Callable[[], T], *, everywhere: bool) -> list[T]:
        if self._transport is None or self.size == 1:
            return [work()]
        result, error = _outcome(work)
        failures, results = self._transport.gather(_text(error), result, everywhere)
        return _checked(results, error, failures)


class ServiceTransport:
    """JAX's coordination service: results are JSON, a broadcast is one request, others 3 to 5.

    Args:
        rank: of this process in the run.
        ranks: of the processes of the group in the run, ascending.
        namespace: of the keys; no other group has it.
    """

    def __init__(self, rank: int, ranks: Sequence[int], namespace: str):
        """See the class."""
        self._rank, self._ranks = rank, ranks
        self._is_first = rank == ranks[0]
        self._namespaces = (f"{namespace}/{index}" for index in itertools.count(1))

    def barrier(self, error: str) -> str:
        """See `Transport`."""
        return self._barrier(next(self._namespaces), error)

    def gather(self, error: str, value: Any, everywhere: bool) -> tuple[str, list[Any]]:
        """See `Transport`."""
        namespace, results = next(self._namespaces), []
        put(f"{namespace}/values/{self._rank}", json.dumps(value))
        failures = self._barrier(namespace, error)
        if self._is_first and not failures:
            texts = values(namespace)
            delete(f"{namespace}/values")
            results = [json.loads(texts[rank]) for rank in self._ranks]
        if failures or not everywhere:
            return failures, results
        return self.broadcast("", results)

    def broadcast(self, error: str, value: Any) -> tuple[str, Any]:
        """See `Transport`."""
        namespace = next(self._namespaces)
        if self._is_first:
            put(namespace, json.dumps([error, value]))
        else:
            text = get(namespace, TIMEOUT)
            error, value = json.loads(text) if text else (f"silent for {TIMEOUT:g} s", None)
        return failures_of({self._ranks[0]: error}), value

    def _barrier(self, namespace: str, error: str) -> str:
        lines = [error] if error else []
        return _Failures(namespace, self._ranks, self._rank, lines, TIMEOUT).wait()


class _Failures(Barrier):
    """The line of a process is its error."""

    def explain(self, lines: Lines) -> str:
        timed_out = f"silent for {TIMEOUT:g} s"
        return failures_of(
            {rank: timed_out if error is None else " ".join(error) for rank, error in lines.items()}
        )


def failures_of(errors: Mapping[int, str]) -> str:
    """A message with the errors of a group's processes; "" if there are none.

    Example:
        >>> failures_of({0: "", 3: "OSError: no space left"})
        'rank 3: OSError: no space left'
    """
    listed = [f"rank {rank}: {error}" for rank, error in errors.items() if error]
    more = f"; and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return "; ".join(listed[:_MOST]) + more


def _outcome(work: Callable[[], T]) -> tuple[T, None] | tuple[Any, BaseException]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _checked(result: T, error: BaseException | None, failures: str) -> T:
    if error is not None:
        raise error
    if failures:
        raise CheckpointError(f"other processes failed: {failures}")
    return result
