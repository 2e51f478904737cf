"""The handshake: all processes send a report to rank 0, and it answers whether they can run.

It happens before JAX's and torch's runtimes start, at the port that rank 0 will use for one: a
port that is taken, a coordinator that cannot be reached, another run's port, a rank too many or too
few, and different versions are errors at once, before any runtime hangs. A process sends one line
and receives two, however many there are.

    rank 0:  isoshard-roll-call 1                    at once: this port is rank 0's
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
['rank 1 (n1) resolves its own host name to 127.0.1.1, which other machines cannot reach, and gloo \
connects to: remove the name from the 127. lines of /etc/hosts there, or set GLOO_SOCKET_IFNAME to \
the interface that leads to the others']
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

CLOCK_TOLERANCE = 5.0
"""Seconds by which clocks may differ without a warning."""

CANNOT_RUN = "the processes cannot run together:"
"""The start of the error that every process raises."""

_MARK = b"isoshard-roll-call 1"
_GREETING = 10.0  # seconds in which rank 0 greets a caller; it does nothing else meanwhile
_LINGER = 2.0  # seconds in which an error is still sent to other ranks
_LONGEST = 65536
_STEP = 0.2


@dataclasses.dataclass(frozen=True)
class EnvReport:
    """A process's report to rank 0.

    Attributes:
        rank: of the process.
        size: number of processes, as this one has it.
        launcher: that started it.
        run: the name that its scheduler gave the run; "" without one.
        host: name of its machine.
        machine: distinguishes machines of one name; "" if nothing does.
        address: to which its machine resolves its own name; "" if none, or if gloo ignores it.
        pid: on its machine.
        versions: of Python and the packages that affect compiled programs; None: not installed.
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
    """Errors for which the processes cannot run together, from the reports received, by rank."""
    conflicts = []
    if (sizes := _groups(reports, lambda report: report.size)) and len(sizes) > 1:
        text = ", ".join(f"{_these(some)} one of {size}" for size, some in sizes.items())
        conflicts.append(
            f"the processes have different sizes: {text}. Start them by one command, or set the "
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
    """Warnings about problems that may occur between the processes; as for `conflicts`."""
    cautions = []
    for host, group in _groups(reports, lambda report: report.host).items():
        machines = _groups(group, lambda report: report.machine)
        if len(machines) > 1:
            text = " and ".join(_ranks(some) for some in machines.values())
            cautions.append(
                f"{text} run on different machines that are both called {host!r}: NCCL takes them "
                "for one, and hangs; give each machine a name of its own (hostnamectl hostname)"
            )
    if len(_groups(reports, lambda report: (report.host, report.machine))) > 1:
        for address, group in _groups(reports, lambda report: report.address).items():
            if address.startswith("127."):
                verb, their = ("resolves", "its") if len(group) == 1 else ("resolve", "their")
                cautions.append(
                    f"{_these(group)} {verb} {their} own host name to {address}, which other "
                    "machines cannot reach, and gloo connects to: remove the name from the 127. "
                    "lines of /etc/hosts there, or set GLOO_SOCKET_IFNAME to the interface that "
                    "leads to the others"
                )
    pythons = _groups(reports, lambda report: str(report.versions.get("python")).rpartition(".")[0])
    if len(pythons) > 1:
        text = ", ".join(f"{version} on {_these(group)}" for version, group in pythons.items())
        cautions.append(f"Python is {text}: objects pickled by one may not load in another")
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
    """Run the handshake at a port of rank 0, which is free before and after.

    Args:
        report: of this process.
        address: "host:port" of rank 0, as the others reach it.
        timeout: seconds within which all must arrive.

    Raises:
        DistributedError: in every process that can be reached, with the reason.
    """
    host, port = split_address(address)
    if report.rank == 0:
        result = _Rank0(report, host, port, timeout).run()
    else:
        result = _connect_to_rank_0(report, host, port, timeout)
    _apply(report, result)


def handshake_by_service(report: EnvReport, timeout: float) -> None:
    """Run the handshake through JAX's coordination service, which runs already."""
    text = json.dumps(dataclasses.asdict(report))
    if coordination.arrive("handshake", report.rank, report.size, text):
        coordination.put("handshake/all", "came")
    if report.rank:
        text = coordination.get("handshake/result", timeout + _LINGER)
        if text is None:
            raise DistributedError(
                f"{report.name} received nothing from rank 0 within {timeout:g} s"
            )
        _apply(report, json.loads(text))
        return
    coordination.get("handshake/all", timeout)
    by_rank = coordination.values("handshake")
    missing = [rank for rank in range(report.size) if rank not in by_rank]
    reports = [EnvReport(**json.loads(by_rank[rank])) for rank in sorted(by_rank)]
    wrong = conflicts(reports) + ([_missing(missing, report.size, timeout)] if missing else [])
    result = _result(wrong, reports)
    coordination.put("handshake/result", json.dumps(_for_others(result)))
    _apply(report, result)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"; `DistributedError` for any other text.

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


def _apply(report: EnvReport, result: dict[str, Any]) -> None:
    """Raise rank 0's errors or warn; compare clocks, as all receive the result at the same time."""
    if result["faults"]:
        raise DistributedError(CANNOT_RUN + "".join(f"\n  {x}" for x in result["faults"]))
    for caution in result["cautions"] if report.rank == 0 else ():
        warnings.warn(caution, ClusterWarning, stacklevel=4)
    offset = _now() - result["clock"]
    if abs(offset) > CLOCK_TOLERANCE:
        way = "ahead of" if offset > 0 else "behind"
        warnings.warn(
            f"the clock of {report.name} is {abs(offset):.0f} s {way} rank 0's: logs, certificates "
            "and the times of files mislead; start chrony or ntpd on both machines",
            ClusterWarning,
            stacklevel=4,
        )


# The keys of the result are those of earlier versions: the handshake must find other versions.
def _result(wrong: list[str], reports: list[EnvReport]) -> dict[str, Any]:
    return {"faults": wrong, "cautions": [] if wrong else cautions(reports), "clock": _now()}


def _for_others(result: dict[str, Any]) -> dict[str, Any]:
    """The result that is sent to the others, without warnings: only rank 0 issues those."""
    return {**result, "cautions": []}


def _missing(ranks: list[int], size: int, timeout: float) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (", .." if len(ranks) > 16 else "")
    return (
        f"rank{'s' * (len(ranks) > 1)} {listed} of {size} did not connect within {timeout:g} s. "
        "Were they started, have they failed (see their own output), and do they have the same "
        "coordinator? If there is a rank too few, start all, or set the smaller count"
    )


class _Rank0:
    """The handshake in rank 0."""

    def __init__(self, report: EnvReport, host: str, port: int, timeout: float):
        """Start with the report of rank 0 only."""
        self.report, self.host, self.port, self.timeout = report, host, port, timeout
        self.reports = {0: report}
        self.wrong: list[str] = []
        self.peers: list[socket.socket] = []
        self.strangers = 0

    def run(self) -> dict[str, Any]:
        """Wait for the others, and send them the result."""
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
            result = self._decide()
            line = _MARK + b" " + json.dumps(_for_others(result)).encode() + b"\n"
            for peer in self.peers:
                peer.setblocking(True)
                peer.settimeout(_GREETING)
                _send(peer, line)
            for peer in self.peers:
                _await_end(
                    peer
                )  # TIME_WAIT keeps the port of the side that closes first: not rank 0's
            return result

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
        own = self.report
        if own.run and report.run and own.run != report.run:
            error = (
                f"{own.host}:{self.port} is the port of another run: {report.name} belongs to "
                f"{report.run}, rank 0 there to {own.run}. Give each run a coordinator and a port "
                "of its own (MASTER_ADDR and MASTER_PORT, or JAX_COORDINATOR_PORT)"
            )
            _send(peer, _MARK + b" " + json.dumps(_result([error], [])).encode() + b"\n")
            _await_end(peer)
            return
        self.peers.append(peer)
        first = self.reports.get(report.rank)
        if first is not None:
            self.wrong.append(
                f"two processes are rank {report.rank} of {report.size}: process {first.pid} on "
                f"{first.host} and process {report.pid} on {report.host}. A rank too many: start "
                "each once, with a rank of its own"
            )
        elif report.size != own.size or report.rank >= own.size:
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
                    f". {self.strangers} connections were no ranks of this isoshard: another "
                    "version of it, or another program"
                )
            wrong = [text + _elsewhere(self.host)]
        return _result(list(dict.fromkeys(wrong)), reports)


def _bound(port: int, size: int) -> socket.socket:
    """Rank 0's listener, at every address of the machine, or at JAX's bind address."""
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
            "where the others connect: "
            + ("another program uses it" if taken else str(error))
            + ". Has a former run not ended? Give the run a free port: MASTER_PORT with torchrun "
            "and its variables, else JAX_COORDINATOR_PORT, the same in all processes"
        ) from None


def _connect_to_rank_0(report: EnvReport, host: str, port: int, timeout: float) -> dict[str, Any]:
    """The handshake in another rank: connect until rank 0 sends a result, or until the timeout."""
    end, pause, why = time.monotonic() + timeout, 0.02, "no connection was tried"
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, port), max(0.1, end - time.monotonic())) as peer:
                if peer.getsockname() != peer.getpeername():  # a port may call itself
                    result = _result_from(peer, report, end)
                    if result is not None:
                        return result
                why = (
                    "the listener there closed the connection; rank 0 has failed, or has not begun"
                )
        except socket.gaierror:
            why = f"the name {host!r} cannot be resolved on this machine"
        except ConnectionRefusedError:
            why = "no process listens there: rank 0 does not run, or on another machine or port"
        except TimeoutError:
            why = "there is no answer: a firewall, or a machine that does not run or hangs"
        except OSError as error:
            why = str(error)
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
    raise DistributedError(
        f"{report.name} of {report.size} could not reach rank 0 at {host}:{port} within "
        f"{timeout:g} s: {why}. Is that rank 0's machine, can its port be reached (firewall), and "
        f"was rank 0 started? This process was started by {report.launcher}"
    )


def _result_from(peer: socket.socket, report: EnvReport, end: float) -> dict[str, Any] | None:
    """The result that rank 0 sends; None if it closes the connection before."""
    host, port = peer.getpeername()[:2]
    foreign = DistributedError(
        f"the listener at {host}:{port} is not rank 0 of this run, which {report.name} of "
        f"{report.size} expects there: another program's port, another version of isoshard, or a "
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
    except OSError:  # it has ended, and will be reported as missing
        peer.close()
        return False
    return True


def _await_end(peer: socket.socket) -> None:
    peer.settimeout(1.0)
    with contextlib.suppress(OSError), peer:  # it has received all, or has ended
        peer.recv(1)


def _elsewhere(host: str) -> str:
    """A hint if the coordinator's name is that of another machine."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except socket.gaierror:
        return f". The coordinator's name {host!r} cannot be resolved on rank 0's machine"
    except OSError:
        return f". {host!r} is no address of rank 0's machine, {socket.gethostname()}"
    return ""
