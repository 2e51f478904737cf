"""What each process of a run says of itself before they begin, and what is wrong between them.

>>> import dataclasses
>>> first = Note(0, 2, "torchrun", "job 7", "n0", "boot a", "10.0.0.1", 11, {"isoshard": "0.2"})
>>> other = dataclasses.replace(first, rank=1, host="n1", versions={"isoshard": "0.1"})
>>> print(*faults([first, other]), sep="\\n")
isoshard is 0.2 on rank 0 (n0), 0.1 on rank 1 (n1): install one version everywhere, for instance \
that of rank 0 (n0)
>>> cautions([first, dataclasses.replace(other, machine="boot b", address="127.0.1.1")])
['rank 1 (n1) takes its own host name for 127.0.1.1, where other machines cannot reach it, and \
gloo tells them to: take the name out of the 127. lines of /etc/hosts there, or set \
GLOO_SOCKET_IFNAME to the interface that leads to the others']
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import socket
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from isoshard.core.runtime.formatting import listed

from .launchers import Launch

MUST_MATCH = ("isoshard", "jax", "jaxlib", "torch")
_RUNS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "JOBSET_NAME", "RAY_JOB_ID")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux: names a machine until its next start


@dataclasses.dataclass(frozen=True)
class Note:
    """One process.

    Attributes:
        rank: its number.
        size: how many there are, as it knows.
        launcher: who started it.
        run: the name that its scheduler gave the run; "" without one.
        host: name of its machine.
        machine: what tells machines apart that have one name; "" if nothing does.
        address: where its machine finds its own name; "" if nowhere, or if gloo does not ask.
        pid: its number on its machine.
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


def note_of(launch: Launch) -> Note:
    """What this process says of itself.

    Args:
        launch: who started it, as which of how many.
    """
    return Note(
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


def faults(notes: Sequence[Note]) -> list[str]:
    """What keeps the processes from running together.

    Args:
        notes: of those that have come, in the order of their ranks.
    """
    found = []
    if (sizes := _groups(notes, lambda note: note.size)) and len(sizes) > 1:
        said = ", ".join(f"{_these(who)} one of {size}" for size, who in sizes.items())
        found.append(
            f"the processes do not count alike: {said}. Start them by one command, or set the "
            "same count (WORLD_SIZE) in all, and the ranks 0 to count - 1 once each"
        )
    for name in MUST_MATCH:
        versions = _groups(notes, lambda note, name=name: note.versions.get(name))
        if len(versions) > 1:
            said = ", ".join(f"{v or 'missing'} on {_these(who)}" for v, who in versions.items())
            one = notes[0].versions.get(name)
            fix = f"pip install {name}=={one}" if one else f"pip install {name}"
            if name == "isoshard":  # rank 0 may have it from a checkout or a wheel file
                fix = f"that of {notes[0].name}"
            found.append(f"{name} is {said}: install one version everywhere, for instance {fix}")
    return found


def cautions(notes: Sequence[Note]) -> list[str]:
    """What may go wrong between the processes, and need not.

    Args:
        notes: as for `faults`.
    """
    found = []
    for host, who in _groups(notes, lambda note: note.host).items():
        machines = _groups(who, lambda note: note.machine)
        if len(machines) > 1:
            said = " and ".join(_ranks(some) for some in machines.values())
            found.append(
                f"{said} run on different machines that are both called {host!r}: NCCL takes them "
                "for one, and hangs; give each machine a name of its own (hostnamectl hostname)"
            )
    if len(_groups(notes, lambda note: (note.host, note.machine))) > 1:
        for address, who in _groups(notes, lambda note: note.address).items():
            if address.startswith("127."):
                take, their = ("takes", "its") if len(who) == 1 else ("take", "their")
                found.append(
                    f"{_these(who)} {take} {their} own host name for {address}, where other "
                    "machines cannot reach it, and gloo tells them to: take the name out of the "
                    "127. lines of /etc/hosts there, or set GLOO_SOCKET_IFNAME to the interface "
                    "that leads to the others"
                )
    pythons = _groups(notes, lambda note: str(note.versions.get("python")).rpartition(".")[0])
    if len(pythons) > 1:
        said = ", ".join(f"{version} on {_these(who)}" for version, who in pythons.items())
        found.append(f"Python is {said}: what one pickles another may not read")
    return found


def _groups(notes: Sequence[Note], key: Callable[[Note], Hashable]) -> dict[Any, list[Note]]:
    found: dict[Any, list[Note]] = {}
    for note in notes:
        found.setdefault(key(note), []).append(note)
    return found


def _ranks(notes: Sequence[Note]) -> str:
    return f"rank{'s' * (len(notes) > 1)} {listed([str(note.rank) for note in notes], 8)}"


def _these(notes: Sequence[Note]) -> str:
    hosts = list(dict.fromkeys(note.host for note in notes))
    return f"{_ranks(notes)} ({', '.join(hosts[:3])}{', ..' * (len(hosts) > 3)})"


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
