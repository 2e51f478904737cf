"""All processes say who they are to rank 0, and hear from it whether they can run together.

This comes before JAX's and torch's runtimes start, at the port that rank 0 will give one of them:
a port that is taken, a coordinator that nobody reaches, somebody else's port, a rank too many or
too few, other versions are told at once, in words, and no runtime has hung yet. Each process says
one line and hears two, however many there are.

    rank 0:  isoshard-roll-call 1                    at once: this is the right port
    rank 3:  isoshard-roll-call 1 {"rank": 3, ..}
    rank 0:  isoshard-roll-call 1 {"faults": [], "cautions": [], "clock": 1764257820.1}

Where another process holds the port (torchrun's agent) or the runtimes run already, the same words
go through JAX's coordination service: `call_through_service`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import time
import warnings
from typing import Any

from isoshard.core.errors import ClusterWarning, DistributedError

from . import coordination
from .notes import Note, cautions, faults

APART = 5.0
"""Seconds that clocks may differ before a rank is told."""

APART_ALL = "the processes cannot run together:"
"""How an error begins that every process has heard."""

_MARK = b"isoshard-roll-call 1"
_GREETING = 10.0  # seconds in which rank 0 greets who calls; it does nothing else meanwhile
_LINGER = 2.0  # seconds in which others still hear of a fault
_LONGEST = 65536
_STEP = 0.2


def call_by_port(note: Note, address: str, timeout: float) -> None:
    """Call the roll at a port of rank 0, which is free before and after.

    Args:
        note: of this process.
        address: "host:port", rank 0's machine as the others reach it.
        timeout: seconds within which all must have come.

    Raises:
        DistributedError: in every process that can hear it: what is wrong.
    """
    host, port = split(address)
    if note.rank == 0:
        verdict = _Roll(note, host, port, timeout).verdict()
    else:
        verdict = _answer(note, host, port, timeout)
    _obey(note, verdict)


def call_through_service(note: Note, timeout: float) -> None:
    """Call the roll through JAX's coordination service, which runs already.

    Args:
        note: of this process.
        timeout: seconds within which all must have come.

    Raises:
        DistributedError: as for `call_by_port`.
    """
    coordination.put(f"roll/notes/{note.rank}", json.dumps(dataclasses.asdict(note)))
    if coordination.increment("roll/came") == note.size:
        coordination.put("roll/all", "came")
    if note.rank:
        said = coordination.get("roll/verdict", timeout + _LINGER)
        if said is None:
            raise DistributedError(f"{note.name} heard nothing of rank 0 in {timeout:g} s")
        _obey(note, json.loads(said))
        return
    coordination.get("roll/all", timeout)
    found = {int(rank): said for rank, said in coordination.get_below("roll/notes").items()}
    missing = [rank for rank in range(note.size) if rank not in found]
    notes = [Note(**json.loads(found[rank])) for rank in sorted(found)]
    wrong = faults(notes) + ([_missing(missing, note.size, timeout)] if missing else [])
    verdict = _verdict(wrong, notes)
    coordination.put("roll/verdict", json.dumps(_for_others(verdict)))
    _obey(note, verdict)


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port".

    Args:
        address: to be split.

    Raises:
        DistributedError: it is none.

    Example:
        >>> split("[fe80::1]:29500")
        ('fe80::1', 29500)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DistributedError(f"the coordinator's address is {address!r}, not HOST:PORT")
    return host.strip("[]"), int(port)


def _now() -> float:
    return time.time()


def _obey(note: Note, verdict: dict[str, Any]) -> None:
    """Raise or warn as rank 0 says; compare clocks, as all hear it at the same time."""
    if verdict["faults"]:
        raise DistributedError(APART_ALL + "".join(f"\n  {x}" for x in verdict["faults"]))
    for caution in verdict["cautions"] if note.rank == 0 else ():
        warnings.warn(caution, ClusterWarning, stacklevel=4)
    apart = _now() - verdict["clock"]
    if abs(apart) > APART:
        way = "ahead of" if apart > 0 else "behind"
        warnings.warn(
            f"the clock of {note.name} is {abs(apart):.0f} s {way} rank 0's: logs, certificates "
            "and the times of files mislead; start chrony or ntpd on both machines",
            ClusterWarning,
            stacklevel=4,
        )


def _verdict(wrong: list[str], notes: list[Note]) -> dict[str, Any]:
    return {"faults": wrong, "cautions": [] if wrong else cautions(notes), "clock": _now()}


def _for_others(verdict: dict[str, Any]) -> dict[str, Any]:
    """What the others hear: cautions, of which there may be many, rank 0 alone tells."""
    return {**verdict, "cautions": []}


def _missing(ranks: list[int], size: int, timeout: float) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (", .." if len(ranks) > 16 else "")
    return (
        f"rank{'s' * (len(ranks) > 1)} {listed} of {size} did not come within {timeout:g} s. Have "
        "they been started, have they failed (see their own output), and do they know the same "
        "coordinator? A rank too few: start all, or say the smaller count"
    )


class _Roll:
    """Rank 0's side."""

    def __init__(self, note: Note, host: str, port: int, timeout: float):
        """Nobody has come yet."""
        self.note, self.host, self.port, self.timeout = note, host, port, timeout
        self.notes = {0: note}
        self.wrong: list[str] = []
        self.peers: list[socket.socket] = []
        self.strangers = 0

    def verdict(self) -> dict[str, Any]:
        """Wait for the others, decide, and tell them."""
        end = time.monotonic() + self.timeout
        with _bound(self.port, self.note.size) as listener, selectors.DefaultSelector() as ears:
            ears.register(listener, selectors.EVENT_READ, None)
            while len(self.notes) < self.note.size and time.monotonic() < end:
                for key, _ in ears.select(_STEP):
                    if key.data is None:
                        peer, _ = listener.accept()
                        peer.setblocking(False)
                        if _send(peer, _MARK + b"\n"):
                            ears.register(peer, selectors.EVENT_READ, bytearray())
                    else:
                        self._hear(ears, key.fileobj, key.data)
                        end = min(end, time.monotonic() + _LINGER) if self.wrong else end
            verdict = self._decide()
            said = _MARK + b" " + json.dumps(_for_others(verdict)).encode() + b"\n"
            for peer in self.peers:
                peer.setblocking(True)
                peer.settimeout(_GREETING)
                _send(peer, said)
            for peer in self.peers:
                _await_end(peer)  # who closes first keeps the port for a minute: not rank 0
            return verdict

    def _hear(self, ears: selectors.BaseSelector, peer: Any, heard: bytearray) -> None:
        try:
            more = peer.recv(_LONGEST)
        except OSError:
            more = b""
        heard += more
        if more and b"\n" not in heard and len(heard) < _LONGEST:
            return
        ears.unregister(peer)
        said = _parsed(bytes(heard))
        if said is None:
            self.strangers += 1
            peer.close()
            return
        self._count(Note(**said), peer)

    def _count(self, note: Note, peer: socket.socket) -> None:
        mine = self.note
        if mine.run and note.run and mine.run != note.run:
            fault = (
                f"{mine.host}:{self.port} is the port of another run: {note.name} belongs to "
                f"{note.run}, rank 0 there to {mine.run}. Give each run a coordinator and a port "
                "of its own (MASTER_ADDR and MASTER_PORT, or JAX_COORDINATOR_PORT)"
            )
            _send(peer, _MARK + b" " + json.dumps(_verdict([fault], [])).encode() + b"\n")
            _await_end(peer)
            return
        self.peers.append(peer)
        there = self.notes.get(note.rank)
        if there is not None:
            self.wrong.append(
                f"two processes are rank {note.rank} of {note.size}: process {there.pid} on "
                f"{there.host} and process {note.pid} on {note.host}. A rank too many: start each "
                "once, with a number of its own"
            )
        elif note.size != mine.size or note.rank >= mine.size:
            self.wrong += faults([*self.notes.values(), note])
        else:
            self.notes[note.rank] = note

    def _decide(self) -> dict[str, Any]:
        notes = [self.notes[rank] for rank in sorted(self.notes)]
        wrong = self.wrong or faults(notes)
        absent = [rank for rank in range(self.note.size) if rank not in self.notes]
        if absent and not wrong:
            told = _missing(absent, self.note.size, self.timeout)
            if self.strangers:
                told += (
                    f". {self.strangers} called that were no ranks of this isoshard: another "
                    "version of it, or another program"
                )
            wrong = [told + _elsewhere(self.host)]
        return _verdict(list(dict.fromkeys(wrong)), notes)


def _bound(port: int, size: int) -> socket.socket:
    """Rank 0's ear, at every address of the machine, or at the one that JAX is told to take."""
    where, given = "", os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if given:
        where, port = split(given)
        where = "" if where == "::" else where
    both = socket.has_dualstack_ipv6() and not where
    family = socket.AF_INET6 if both or ":" in where else socket.AF_INET
    try:
        return socket.create_server(
            (where, port), family=family, backlog=max(128, size), dualstack_ipv6=both
        )
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise DistributedError(
            f"rank 0 of {size} cannot listen at port {port} of {where or socket.gethostname()}, "
            "where the others are to find it: "
            + ("another program has taken it" if taken else str(error))
            + ". Has a former run not ended? Give the run a free port: MASTER_PORT with torchrun "
            "and its variables, else JAX_COORDINATOR_PORT, the same in all processes"
        ) from None


def _answer(note: Note, host: str, port: int, timeout: float) -> dict[str, Any]:
    """Another rank's side: call rank 0 until it answers, or until the time is over."""
    end, pause, why = time.monotonic() + timeout, 0.02, "nobody was asked"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, port), max(0.1, end - time.monotonic())) as peer:
                if peer.getsockname() != peer.getpeername():  # a port may call itself
                    said = _told(peer, note, end)
                    if said is not None:
                        return said
                why = "what listened there hung up; rank 0 has failed, or does not begin"
        except socket.gaierror:
            why = f"the name {host!r} is not known on this machine"
        except ConnectionRefusedError:
            why = "nobody listens there: rank 0 does not run, or on another machine or port"
        except TimeoutError:
            why = "no answer comes from there: a firewall, a machine that is not, or one that hangs"
        except OSError as error:
            why = str(error)
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
    raise DistributedError(
        f"{note.name} of {note.size} could not reach rank 0 at {host}:{port} within {timeout:g} s: "
        f"{why}. Is that rank 0's machine, can its port be reached (firewall), and was rank 0 "
        f"started? This process was started by {note.launcher}"
    )


def _told(peer: socket.socket, note: Note, end: float) -> dict[str, Any] | None:
    """What rank 0 says; None if it hung up before it said all."""
    host, port = peer.getpeername()[:2]
    foreign = DistributedError(
        f"what answers at {host}:{port} is not rank 0 of this run, which {note.name} of "
        f"{note.size} looks for there: another program's port, another version of isoshard, or a "
        "run that has begun without this process (a rank too many). Give the run a coordinator "
        "and a port of its own"
    )
    with peer.makefile("rb") as lines:
        peer.settimeout(min(_GREETING, max(0.1, end - time.monotonic())))
        try:
            greeting = lines.readline(_LONGEST)
        except TimeoutError:
            raise foreign from None
        if greeting.rstrip() != _MARK:
            if greeting:
                raise foreign
            return None
        said = json.dumps(dataclasses.asdict(note)).encode()
        peer.sendall(_MARK + b" " + said + b"\n")
        peer.settimeout(max(0.1, end - time.monotonic()) + _LINGER)
        return _parsed(lines.readline(_LONGEST))


def _parsed(line: bytes) -> dict[str, Any] | None:
    mark, _, said = line.partition(b" {")
    if mark != _MARK:
        return None
    try:
        return json.loads(b"{" + said)
    except ValueError:
        return None


def _send(peer: socket.socket, said: bytes) -> bool:
    try:
        peer.sendall(said)
    except OSError:  # it has gone, and is missed where ranks are counted
        peer.close()
        return False
    return True


def _await_end(peer: socket.socket) -> None:
    peer.settimeout(1.0)
    with contextlib.suppress(OSError), peer:  # it has heard, or has gone
        peer.recv(1)


def _elsewhere(host: str) -> str:
    """A hint, if the coordinator's name leads to another machine than this one."""
    try:
        found = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((found, 0))
    except socket.gaierror:
        return f". The coordinator's name {host!r} is not known on rank 0's machine"
    except OSError:
        return f". {host!r} is no address of rank 0's machine, {socket.gethostname()}"
    return ""
