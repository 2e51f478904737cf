"""SLURM on one machine: munged, slurmctld and slurmd of Debian's packages, for as long as asked."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.multi_process import ranks

_CONF = """\
ClusterName=isoshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
UP = 60.0
"""Seconds within which the node is idle."""


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[dict[str, str]]:
    """A cluster of one node with that many processors, whatever there are.

    Args:
        cpus: tasks that run at once.

    Yields:
        The variables for sbatch, srun and the others.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)  # munge's socket stands in it
    (folder / "munge").mkdir(mode=0o700)
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    ports = {"controller": ranks.free_port(), "daemon": ranks.free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(host=host, folder=folder, cpus=cpus, **ports))
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    variables = {"SLURM_CONF": str(conf)}
    daemons = [
        [
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge/pid"),
            *(f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"),
        ],
        ["slurmctld", "-D", "-i", "-f", str(conf)],
        ["slurmd", "-D", "-N", host, "-f", str(conf)],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "output.log").open("wb") as log:
            for command in daemons:
                started.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
                time.sleep(1.0)
        _wait_idle(variables, folder)
        yield variables
    finally:
        for one in reversed(started):
            ranks._kill(one)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_idle(variables: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + UP
    told = ""
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=UP,
            check=False,
        )
        told = done.stdout + done.stderr
        if done.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "".join(
        f"\n{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log"))
    )
    raise AssertionError(f"SLURM is not ready after {UP:g} s: {told}{logs}")
