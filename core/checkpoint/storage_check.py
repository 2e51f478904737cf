"""A check that checkpoints will fit, before a run spends time on what they save.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     check_storage(folder, 10**6, keep=2).needed
3000000
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
import uuid
from pathlib import Path

from isoshard.core.errors import CheckpointError
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.core.runtime.formatting import human_bytes

from .steps import TEMPORARY, Steps
from .store import LocalStore, local

_PROBE = 32 * 2**20
_CHUNK = 2**20
_VISIBLE_WITHIN = 5.0
"""Seconds within which a process must see a file that another has written."""


@dataclasses.dataclass(frozen=True)
class StorageCheck:
    """Free space and speed of a folder for checkpoints.

    Attributes:
        needed: bytes that will be written there before anything is removed.
        free: bytes that are free.
        rate: bytes per second that one process writes, the file synced.
    """

    needed: int
    free: int
    rate: float


def check_storage(
    path: str | os.PathLike[str], nbytes: int, *, keep: int = 2, seconds: float | None = None
) -> StorageCheck:
    """Raise if checkpoints will not fit the storage, or would take too long.

    Where there are several processes, all call this; the first one writes a file of at most 32 MiB
    and removes it, and the others check that they see it.

    Args:
        path: the folder that `iso.save` will be given; it is made if need be.
        nbytes: of one checkpoint. An optimizer has its state after its first step only: with Adam
            a checkpoint is three times the parameters.
        keep: as for `iso.save`; one more has to fit, which is written before another is removed.
            Checkpoints that are there already count.
        seconds: the most that writing one may take, by the rate that is measured here; None: any.

    Returns:
        The measurements; the same in every process.

    Raises:
        CheckpointError: it does not fit, it would take too long, or a process sees another folder
            under that path.
        ValueError: `keep` is 0, which keeps all, so the bytes needed are unknown.
        OSError: the folder cannot be made or written to.

    Example:
        >>> import tempfile, isoshard as iso
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         iso.checkpoint.check_storage(folder, 10**18)
        ...     except iso.CheckpointError as error:
        ...         print("keep=2, and the one that is being written) need" in str(error))
        True
    """
    if keep < 1:
        raise ValueError(f"keep={keep} keeps every checkpoint; give how many are to remain")
    root = os.path.abspath(local(path))  # noqa: PTH100 (links stay as they are)
    group = ProcessGroup.world()
    probe, written, rate = group.broadcast(lambda: _written(root, nbytes))
    try:
        group.run(lambda: _wait_for_probe(root, probe, written))
    finally:
        needed_and_free = group.broadcast(lambda: _removed(root, probe, nbytes, keep))
    check = StorageCheck(*needed_and_free, rate)
    group.broadcast(lambda: _judge(root, check, nbytes, keep, seconds))
    return check


def _written(root: str, nbytes: int) -> tuple[str, int, float]:
    store = LocalStore(root)
    folder = f"{TEMPORARY}{uuid.uuid4().hex[:8]}"  # the next save removes it if this is killed
    probe = f"{folder}/probe"
    store.make_folder(folder)
    size = max(1, min(nbytes, _PROBE, shutil.disk_usage(root).free // 2))
    chunk = os.urandom(_CHUNK)  # a file system that compresses gains nothing
    start = time.perf_counter()
    with store.writing(probe) as file:
        for first in range(0, size, _CHUNK):
            file.write(chunk[: min(_CHUNK, size - first)])
    return probe, size, size / max(time.perf_counter() - start, 1e-9)


def _wait_for_probe(root: str, probe: str, size: int) -> None:
    path, end = Path(root, probe), time.monotonic() + _VISIBLE_WITHIN
    while not path.exists() or path.stat().st_size != size:
        if time.monotonic() > end:
            raise CheckpointError(
                f"{root} is not the folder that the first process writes to: its file {probe} is "
                "missing. All processes save into one folder; give one on a file system that "
                "all machines mount"
            )
        time.sleep(0.05)


def _removed(root: str, probe: str, nbytes: int, keep: int) -> tuple[int, int]:
    store = LocalStore(root)
    store.remove_tree(probe.partition("/")[0])
    steps = Steps(store)
    stored = 0
    for step in steps.all():
        manifest = steps.manifest(steps.folder(step))
        stored += sum(file.size for file in manifest.files.values()) if manifest else 0
    needed = max(nbytes, (keep + 1) * nbytes - stored)
    return needed, shutil.disk_usage(root).free


def _judge(root: str, check: StorageCheck, nbytes: int, keep: int, seconds: float | None) -> None:
    wrong = []
    size, needed, free = map(human_bytes, (nbytes, check.needed, check.free))
    if check.needed > check.free:
        wrong.append(
            f"{keep + 1} checkpoints of {size} (keep={keep}, and the one that is being written) "
            f"need {needed}, and {free} are free there. Free some, or give another folder or a "
            "smaller keep"
        )
    if seconds is not None and nbytes / check.rate > seconds:
        wrong.append(
            f"a checkpoint of {size} would take {nbytes / check.rate:.0f} s from one process, at "
            f"the {human_bytes(check.rate)} per second that were measured, and seconds="
            f"{seconds:g} are allowed. Give a faster storage, or more seconds"
        )
    if wrong:
        raise CheckpointError(f"{root} does not fit this run: {'; '.join(wrong)}")
