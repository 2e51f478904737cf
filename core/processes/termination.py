"""SIGTERM as a request: all processes of a run stop at the same step, save, and end in time.

Schedulers preempt a job by SIGTERM, and kill processes that remain some time later. One process may
get the signal, or all. `Termination` handles it: the processes agree on a step that none of them
has begun, and a process that has not ended within its grace is ended:

    with iso.distributed.Termination(grace=20) as termination:
        for step in range(start, steps):
            ..
            if termination.reached():        # in every process after the same step
                iso.save("run", ..)
                termination.leave()          # exit status 75: not done, start me again

A thread of every process waits for a key of JAX's coordination service. When it is set, each puts
the number of steps that it has ended and begins no other; the last process takes the maximum, and
one step later is the last. Nothing is exchanged before a request.

>>> import os
>>> with Termination() as termination:
...     before = termination.reached()
...     os.kill(os.getpid(), signal.SIGTERM)
...     before, termination.reached()
(False, True)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from isoshard.core.errors import DistributedError

from . import coordination

_HOUR = 3600.0
_ENDED, _REQUESTED = "ended", "requested"
_indices = itertools.count()


class Termination:
    """Handler of SIGTERM; all processes create one, in the main thread, after `init_distributed`.

    The earlier handlers are restored by `close`, or at the end of a `with`. In a thread,
    where Python handles no signals, give `signals=()` and call `request` when the run is to end.

    Args:
        grace: seconds from the request after which a process that has not ended is ended, with
            status 143. Less than the scheduler waits: torchrun, SLURM and Kubernetes give 30.
        signals: that request it, in any of the processes.

    Attributes:
        STATUS: the exit status of `leave`, 75: EX_TEMPFAIL of sysexits.h, "try again".

    Raises:
        ValueError: `grace` is not more than 0.
        RuntimeError: signals are to be handled, and this is not the main thread, or a handler is
            there that Python cannot call: JAX's, of `init_distributed(preemption=True)`.

    Example:
        >>> termination = Termination(grace=5, signals=())
        >>> termination.reached()
        False
        >>> termination.request()
        >>> termination.reached()
        True
        >>> termination.close()
    """

    STATUS = 75

    def __init__(
        self, *, grace: float = 20.0, signals: Sequence[signal.Signals] = (signal.SIGTERM,)
    ) -> None:
        """See the class."""
        if grace <= 0:
            raise ValueError(f"grace is a number of seconds above 0, not {grace!r}")
        if signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "only the main thread can handle signals; make the Termination there, or give "
                "signals=() and call its request() when the run is to end"
            )
        if foreign := [sig.name for sig in signals if signal.getsignal(sig) is None]:
            raise RuntimeError(
                f"{', '.join(foreign)} has a handler that Python cannot put back. Is it that of "
                "JAX's preemption service? "
                "iso.distributed.init_distributed(preemption=False) leaves it out"
            )
        self._grace = grace
        self._count = 0
        self._leaving = False
        self._last: int | None = None  # the count of the step after which all stop
        self._requested = threading.Event()
        self._lock = threading.Lock()
        self._deadline: threading.Timer | None = None
        self._rank, self._size = coordination.rank_and_size()
        self._namespace = f"termination/{next(_indices)}"
        self._listener: threading.Thread | None = None
        if self._size > 1:
            self._listener = _started(self._listen, "isoshard-termination")
        self._wakeup = _Wakeup(signals, self.request)

    def reached(self) -> bool:
        """Whether this step is the last. Every process calls this once a step.

        Returns:
            True in all processes at the same call, and from then on.
        """
        with self._lock:
            self._count += 1
            if self._size == 1:
                return self._requested.is_set()
            return self._last is not None and self._count >= self._last

    def request(self) -> None:
        """Request the end, as a signal does; in any thread of any process."""
        if self._requested.is_set():
            return
        self._requested.set()
        self._begin_deadline()
        if self._size > 1:
            # in a thread, as a signal handler may interrupt a request to the service
            _started(lambda: _put(f"{self._namespace}/word", _REQUESTED), "isoshard-request")

    def leave(self) -> NoReturn:
        """End this process with `STATUS`, by an exception, so `finally` blocks run.

        Raises:
            SystemExit: always.
        """
        self._leaving = True
        raise SystemExit(self.STATUS)

    def close(self) -> None:
        """Restore the handlers. Once a process has, others can no longer request the end."""
        self._wakeup.close()
        if self._listener is not None:
            # A thread that waits in JAX's service while Python ends would take the process with it.
            _put(f"{self._namespace}/word", _ENDED)
            self._listener.join(self._grace)
            self._listener = None
        if self._deadline is not None and not self._leaving:
            self._deadline.cancel()

    def __enter__(self) -> Termination:
        """The Termination itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _listen(self) -> None:
        """Wait, in a thread of its own, for a request; then agree on the last step."""
        with contextlib.suppress(
            DistributedError
        ):  # the service has ended: the failure monitor ends this process
            text = None
            while text is None:
                text = coordination.get(f"{self._namespace}/word", _HOUR)
            if text == _REQUESTED:
                self._begin_deadline()
                self._settle()

    def _settle(self) -> None:
        with self._lock:  # no step ends meanwhile
            if coordination.arrive(self._namespace, self._rank, self._size, str(self._count)):
                counts = coordination.values(self._namespace)
                _put(f"{self._namespace}/last", str(max(map(int, counts.values())) + 1))
            last = coordination.get(f"{self._namespace}/last", self._grace)
            self._last = None if last is None else int(last)

    def _begin_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = threading.Timer(self._grace, self._end)
            self._deadline.daemon = True
            self._deadline.start()

    def _end(self) -> None:
        text = (
            f"isoshard: rank {self._rank} was requested to end {self._grace:g} s ago and has not; "
            "it ends now. Committed checkpoints are complete. A step and a checkpoint have to "
            "fit into the grace of iso.distributed.Termination\n"
        )
        os.write(2, text.encode())  # not sys.stderr, whose lock a hung thread may hold
        os._exit(128 + signal.SIGTERM)


class _Wakeup:
    """Calls a function as soon as a signal arrives, also while the main thread is in C code.

    Python runs handlers between two instructions of the main thread, which may be a whole step
    later; the byte that it writes to the file of `signal.set_wakeup_fd` arrives at once.
    """

    def __init__(self, signals: Sequence[signal.Signals], action: Callable[[], None]) -> None:
        self._action = action
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        if not signals:
            return
        receiver, sender = self._ends = socket.socketpair()
        sender.setblocking(False)
        self._fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._signals = frozenset(map(int, signals))
        self._thread = _started(lambda: self._wait(receiver), "isoshard-signals")
        for sig in signals:
            self._before[sig] = signal.signal(sig, self._handle)

    def close(self) -> None:
        """Restore the handlers."""
        if self._ends is None:
            return
        for sig, before in self._before.items():
            signal.signal(sig, before)
        signal.set_wakeup_fd(self._fd)
        receiver, sender = self._ends
        sender.close()  # ends the thread
        self._thread.join()
        receiver.close()
        self._ends = None

    def _handle(self, signal_number: int, frame: Any) -> None:
        self._action()
        before = self._before[signal.Signals(signal_number)]
        if callable(before):
            before(signal_number, frame)

    def _wait(self, receiver: socket.socket) -> None:
        while signal_numbers := receiver.recv(64):
            if self._fd != -1:  # asyncio's, for instance
                with contextlib.suppress(BlockingIOError):
                    os.write(self._fd, signal_numbers)
            if self._signals.intersection(signal_numbers):
                self._action()


def _started(action: Callable[[], Any], name: str) -> threading.Thread:
    thread = threading.Thread(target=action, name=name, daemon=True)
    thread.start()
    return thread


def _put(key: str, value: str) -> None:
    """Set a key, unless it has a value or the service has gone."""
    with contextlib.suppress(DistributedError):
        coordination.put(key, value)
