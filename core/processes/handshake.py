"""The handshake: all processes send a report to rank 0, and hear whether they can run together.

It comes before JAX's and torch's runtimes start, at the port that rank 0 will give one of them: a
port that is taken, a coordinator that cannot be reached, another run's port, a rank too many or too
few, and other versions are errors at once, before any runtime hangs. A process sends one line and
receives two, however many there are.

    rank 0:  isoshard-roll-call 1                    at once: this is the right port
    rank 3:  isoshard-roll-call 1 {"rank": 3, ..}
    rank 0:  isoshard-roll-call 1 {"faults": [], "cautions": [], "clock": 1764257820.1}

Where another process has the port (torchrun's agent) or the runtimes run already, the same goes
through JAX's coordination service: `handshake_by_service`.

>>> versions = {"isoshard": "0.2"}
>>> first = EnvReport(0, 2, "torchrun", "job 7", "n0", "boot a", "10.0.0.1", 11, versions)
>>> other = dataclasses.replace(first, rank=1, host="n1", versions={"isoshard": "0.1"})
>>> print(*conflicts([first, other]), sep="\\n")
isoshard is 0.2 on rank 0 (n0), 0.1 on rank 1 (n1): install one version everywhere, for instance \
that of rank 0 (n0)
>>> cautions([first, dataclasses.replace(other, machine="boot b", address="127.0.1.1")])
['rank 1 (n1) takes its own host name for 127.0.1.1, where other machines cannot reach it, and \
gloo tells them to: take the name out of the 127. lines of /etc/hosts there, or set \
GLOO_SOCKET_IFNAME to the interface that leads to the others']
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import selectors
import socket
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from isoshard.core.errors import ClusterWarning, DistributedError

from . import coordination
from .launchers import Launch

MUST_MATCH = ("isoshard", "jax", "jaxlib", "torch")
_RUNS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "JOBSET_NAME", "RAY_JOB_ID")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: names a machine until its next start

CLOCKS_APART = 5.0
"""Seconds that clocks may differ without a warning."""

CANNOT_RUN = "the processes cannot run together:"
"""How an error begins that every process raises."""

_MARK = b"isoshard-roll-call 1"
_GREETING = 10.0  # seconds in which rank 0 greets a caller; it does nothing else meanwhile
_LINGER = 2.0  # seconds in which others still hear of an error
_LONGEST = 65536
_STEP = 0.2


@dataclasses.dataclass(frozen=True)
class EnvReport:
    """What a process reports of itself.

    Attributes:
        rank: of the process.
        size: number of processes, as this one has it.
        launcher: that started it.
        run: the name that its scheduler gave the run; "" without one.
        host: name of its machine.
        machine: distinguishes machines of one name; "" if nothing does.
        address: that its machine resolves its own name to; "" if none, or if gloo does not ask.
        pid: on its machine.
        versions: of Python and of the packages that decide what the ranks compile; None: missing.
    """

    rank: int
    size: int
    launcher: str
    run: str
    host: str
    machine: str
    address: str
    pid: int
    versions: dict[str, str | None]

    @property
    def name(self) -> str:
        """Rank and machine, for messages."""
        return f"rank {self.rank} ({self.host})"


def env_report(launch: Launch) -> EnvReport:
    """The report of this process."""
    return EnvReport(
        rank=launch.rank,
        size=launch.size,
        launcher=launch.launcher,
        run=next((f"{name}={os.environ[name]}" for name in _RUNS if name in os.environ), ""),
        host=socket.gethostname(),
        machine=_BOOT.read_text().strip() if _BOOT.exists() else "",
        address="" if "GLOO_SOCKET_IFNAME" in os.environ else _own_address(),
        pid=os.getpid(),
        versions={
            **{name: _version(name) for name in MUST_MATCH},
            "python": platform.python_version(),
        },
    )


def conflicts(reports: Sequence[EnvReport]) -> list[str]:
    """What keeps the processes from running together; of the reports that came, by rank."""
    conflicts = []
    if (sizes := _groups(reports, lambda report: report.size)) and len(sizes) > 1:
        text = ", ".join(f"{_these(some)} one of {size}" for size, some in sizes.items())
        conflicts.append(
            f"the processes do not count alike: {text}. Start them by one command, or set the "
            "same count (WORLD_SIZE) in all, and the ranks 0 to count - 1 once each"
        )
    for name in MUST_MATCH:
        versions = _groups(reports, lambda report, name=name: report.versions.get(name))
        if len(versions) > 1:
            text = ", ".join(f"{v or 'missing'} on {_these(some)}" for v, some in versions.items())
            first = reports[0].versions.get(name)
            fix = f"pip install {name}=={first}" if first else f"pip install {name}"
            if name == "isoshard":  # rank 0 may have it from a checkout or a wheel file
                fix = f"that of {reports[0].name}"
            conflicts.append(
                f"{name} is {text}: install one version everywhere, for instance {fix}"
            )
    return conflicts


def cautions(reports: Sequence[EnvReport]) -> list[str]:
    """What may go wrong between the processes, and need not; as for `conflicts`."""
    cautions = []
    for host, who in _groups(reports, lambda report: report.host).items():
        machines = _groups(who, lambda report: report.machine)
        if len(machines) > 1:
            text = " and ".join(_ranks(some) for some in machines.values())
            cautions.append(
                f"{text} run on different machines that are both called {host!r}: NCCL takes them "
                "for one, and hangs; give each machine a name of its own (hostnamectl hostname)"
            )
    if len(_groups(reports, lambda report: (report.host, report.machine))) > 1:
        for address, who in _groups(reports, lambda report: report.address).items():
            if address.startswith("127."):
                take, their = ("takes", "its") if len(who) == 1 else ("take", "their")
                cautions.append(
                    f"{_these(who)} {take} {their} own host name for {address}, where other "
                    "machines cannot reach it, and gloo tells them to: take the name out of the "
                    "127. lines of /etc/hosts there, or set GLOO_SOCKET_IFNAME to the interface "
                    "that leads to the others"
                )
    pythons = _groups(reports, lambda report: str(report.versions.get("python")).rpartition(".")[0])
    if len(pythons) > 1:
        text = ", ".join(f"{version} on {_these(who)}" for version, who in pythons.items())
        cautions.append(f"Python is {text}: what one pickles another may not read")
    return cautions


def _groups(
    reports: Sequence[EnvReport], key: Callable[[EnvReport], Hashable]
) -> dict[Any, list[EnvReport]]:
    groups: dict[Any, list[EnvReport]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report)
    return groups


def _ranks(reports: Sequence[EnvReport]) -> str:
    listed = ", ".join(str(report.rank) for report in reports[:8])
    more = f" and {len(reports) - 8} more" if len(reports) > 8 else ""
    return f"rank{'s' * (len(reports) > 1)} {listed}{more}"


def _these(reports: Sequence[EnvReport]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    return f"{_ranks(reports)} ({', '.join(hosts[:3])}{', ..' * (len(hosts) > 3)})"


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def handshake_by_port(report: EnvReport, address: str, timeout: float) -> None:
    """Shake hands at a port of rank 0, which is free before and after.

    Args:
        report: of this process.
        address: "host:port", rank 0's machine as the others reach it.
        timeout: seconds within which all must have come.

    Raises:
        DistributedError: in every process that can be reached: what is wrong.
    """
    host, port = split_address(address)
    if report.rank == 0:
        verdict = _Rank0(report, host, port, timeout).verdict()
    else:
        verdict = _answer(report, host, port, timeout)
    _obey(report, verdict)


def handshake_by_service(report: EnvReport, timeout: float) -> None:
    """The same through JAX's coordination service, which runs already."""
    text = json.dumps(dataclasses.asdict(report))
    if coordination.arrive("handshake", report.rank, report.size, text):
        coordination.put("handshake/all", "came")
    if report.rank:
        text = coordination.get("handshake/verdict", timeout + _LINGER)
        if text is None:
            raise DistributedError(f"{report.name} heard nothing of rank 0 in {timeout:g} s")
        _obey(report, json.loads(text))
        return
    coordination.get("handshake/all", timeout)
    by_rank = coordination.values("handshake")
    missing = [rank for rank in range(report.size) if rank not in by_rank]
    reports = [EnvReport(**json.loads(by_rank[rank])) for rank in sorted(by_rank)]
    wrong = conflicts(reports) + ([_missing(missing, report.size, timeout)] if missing else [])
    verdict = _verdict(wrong, reports)
    coordination.put("handshake/verdict", json.dumps(_for_others(verdict)))
    _obey(report, verdict)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"; another text is a `DistributedError`.

    Example:
        >>> split_address("[fe80::1]:29500")
        ('fe80::1', 29500)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DistributedError(f"the coordinator's address is {address!r}, not HOST:PORT")
    return host.strip("[]"), int(port)


def _now() -> float:
    return time.time()


def _obey(report: EnvReport, verdict: dict[str, Any]) -> None:
    """Raise or warn as rank 0 says; compare clocks, as it reaches all at the same time."""
    if verdict["faults"]:
        raise DistributedError(CANNOT_RUN + "".join(f"\n  {x}" for x in verdict["faults"]))
    for caution in verdict["cautions"] if report.rank == 0 else ():
        warnings.warn(caution, ClusterWarning, stacklevel=4)
    apart = _now() - verdict["clock"]
    if abs(apart) > CLOCKS_APART:
        way = "ahead of" if apart > 0 else "behind"
        warnings.warn(
            f"the clock of {report.name} is {abs(apart):.0f} s {way} rank 0's: logs, certificates "
            "and the times of files mislead; start chrony or ntpd on both machines",
            ClusterWarning,
            stacklevel=4,
        )


def _verdict(wrong: list[str], reports: list[EnvReport]) -> dict[str, Any]:
    return {"faults": wrong, "cautions": [] if wrong else cautions(reports), "clock": _now()}


def _for_others(verdict: dict[str, Any]) -> dict[str, Any]:
    """What is sent to the others: rank 0 alone warns of cautions, of which there may be many."""
    return {**verdict, "cautions": []}


def _missing(ranks: list[int], size: int, timeout: float) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (", .." if len(ranks) > 16 else "")
    return (
        f"rank{'s' * (len(ranks) > 1)} {listed} of {size} did not come within {timeout:g} s. Have "
        "they been started, have they failed (see their own output), and do they know the same "
        "coordinator? A rank too few: start all, or say the smaller count"
    )


class _Rank0:
    """Rank 0's side."""

    def __init__(self, report: EnvReport, host: str, port: int, timeout: float):
        """No other rank has come yet."""
        self.report, self.host, self.port, self.timeout = report, host, port, timeout
        self.reports = {0: report}
        self.wrong: list[str] = []
        self.peers: list[socket.socket] = []
        self.strangers = 0

    def verdict(self) -> dict[str, Any]:
        """Wait for the others, decide, and send them the result."""
        end = time.monotonic() + self.timeout
        with (
            _bound(self.port, self.report.size) as listener,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(listener, selectors.EVENT_READ, None)
            while len(self.reports) < self.report.size and time.monotonic() < end:
                for key, _ in selector.select(_STEP):
                    if key.data is None:
                        peer, _ = listener.accept()
                        peer.setblocking(False)
                        if _send(peer, _MARK + b"\n"):
                            selector.register(peer, selectors.EVENT_READ, bytearray())
                    else:
                        self._receive(selector, key.fileobj, key.data)
                        end = min(end, time.monotonic() + _LINGER) if self.wrong else end
            verdict = self._decide()
            line = _MARK + b" " + json.dumps(_for_others(verdict)).encode() + b"\n"
            for peer in self.peers:
                peer.setblocking(True)
                peer.settimeout(_GREETING)
                _send(peer, line)
            for peer in self.peers:
                _await_end(peer)  # who closes first keeps the port for a minute: not rank 0
            return verdict

    def _receive(self, selector: selectors.BaseSelector, peer: Any, received: bytearray) -> None:
        try:
            more = peer.recv(_LONGEST)
        except OSError:
            more = b""
        received += more
        if more and b"\n" not in received and len(received) < _LONGEST:
            return
        selector.unregister(peer)
        fields = _parsed(bytes(received))
        if fields is None:
            self.strangers += 1
            peer.close()
            return
        self._count(EnvReport(**fields), peer)

    def _count(self, report: EnvReport, peer: socket.socket) -> None:
        mine = self.report
        if mine.run and report.run and mine.run != report.run:
            error = (
                f"{mine.host}:{self.port} is the port of another run: {report.name} belongs to "
                f"{report.run}, rank 0 there to {mine.run}. Give each run a coordinator and a port "
                "of its own (MASTER_ADDR and MASTER_PORT, or JAX_COORDINATOR_PORT)"
            )
            _send(peer, _MARK + b" " + json.dumps(_verdict([error], [])).encode() + b"\n")
            _await_end(peer)
            return
        self.peers.append(peer)
        there = self.reports.get(report.rank)
        if there is not None:
            self.wrong.append(
                f"two processes are rank {report.rank} of {report.size}: process {there.pid} on "
                f"{there.host} and process {report.pid} on {report.host}. A rank too many: start "
                "each once, with a number of its own"
            )
        elif report.size != mine.size or report.rank >= mine.size:
            self.wrong += conflicts([*self.reports.values(), report])
        else:
            self.reports[report.rank] = report

    def _decide(self) -> dict[str, Any]:
        reports = [self.reports[rank] for rank in sorted(self.reports)]
        wrong = self.wrong or conflicts(reports)
        absent = [rank for rank in range(self.report.size) if rank not in self.reports]
        if absent and not wrong:
            text = _missing(absent, self.report.size, self.timeout)
            if self.strangers:
                text += (
                    f". {self.strangers} called that were no ranks of this isoshard: another "
                    "version of it, or another program"
                )
            wrong = [text + _elsewhere(self.host)]
        return _verdict(list(dict.fromkeys(wrong)), reports)


def _bound(port: int, size: int) -> socket.socket:
    """Rank 0's listener, at every address of the machine, or at the one that JAX is to bind."""
    host, bind = "", os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bind:
        host, port = split_address(bind)
        host = "" if host == "::" else host
    both = socket.has_dualstack_ipv6() and not host
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=max(128, size), dualstack_ipv6=both
        )
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise DistributedError(
            f"rank 0 of {size} cannot listen at port {port} of {host or socket.gethostname()}, "
            "where the others are to find it: "
            + ("another program has taken it" if taken else str(error))
            + ". Has a former run not ended? Give the run a free port: MASTER_PORT with torchrun "
            "and its variables, else JAX_COORDINATOR_PORT, the same in all processes"
        ) from None


def _answer(report: EnvReport, host: str, port: int, timeout: float) -> dict[str, Any]:
    """Another rank's side: connect to rank 0 until it answers, or until the time is over."""
    end, pause, why = time.monotonic() + timeout, 0.02, "nobody was asked"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, port), max(0.1, end - time.monotonic())) as peer:
                if peer.getsockname() != peer.getpeername():  # a port may call itself
                    verdict = _verdict_from(peer, report, end)
                    if verdict is not None:
                        return verdict
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
        f"{report.name} of {report.size} could not reach rank 0 at {host}:{port} within "
        f"{timeout:g} s: {why}. Is that rank 0's machine, can its port be reached (firewall), and "
        f"was rank 0 started? This process was started by {report.launcher}"
    )


def _verdict_from(peer: socket.socket, report: EnvReport, end: float) -> dict[str, Any] | None:
    """What rank 0 sends; None if it closes the connection before."""
    host, port = peer.getpeername()[:2]
    foreign = DistributedError(
        f"what answers at {host}:{port} is not rank 0 of this run, which {report.name} of "
        f"{report.size} looks for there: another program's port, another version of isoshard, or a "
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
        text = json.dumps(dataclasses.asdict(report)).encode()
        peer.sendall(_MARK + b" " + text + b"\n")
        peer.settimeout(max(0.1, end - time.monotonic()) + _LINGER)
        return _parsed(lines.readline(_LONGEST))


def _parsed(line: bytes) -> dict[str, Any] | None:
    mark, _, fields = line.partition(b" {")
    if mark != _MARK:
        return None
    try:
        return json.loads(b"{" + fields)
    except ValueError:
        return None


def _send(peer: socket.socket, line: bytes) -> bool:
    try:
        peer.sendall(line)
    except OSError:  # it has gone, and is missed where ranks are counted
        peer.close()
        return False
    return True


def _await_end(peer: socket.socket) -> None:
    peer.settimeout(1.0)
    with contextlib.suppress(OSError), peer:  # it has heard, or has gone
        peer.recv(1)


def _elsewhere(host: str) -> str:
    """A hint, if the coordinator's name is that of another machine."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except socket.gaierror:
        return f". The coordinator's name {host!r} is not known on rank 0's machine"
    except OSError:
        return f". {host!r} is no address of rank 0's machine, {socket.gethostname()}"
    return ""
