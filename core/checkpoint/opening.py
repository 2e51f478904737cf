"""Opening the checkpoint at a path, and checking its files before anything is read.

A path may be the folder that `iso.save` was given, the folder of one step in it, a file or folder
of safetensors, a folder that Orbax wrote, or what a framework's bridge can open: folders of
`torch.distributed.checkpoint` and of a `CheckpointManager`.

>>> opened("nowhere")
Traceback (most recent call last):
    ...
isoshard.core.errors.CheckpointError: there is no checkpoint at nowhere: it does not exist
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from isoshard.core.errors import CheckpointError
from isoshard.core.frameworks import require

from . import orbax_format, safetensors_format
from .source import Source
from .steps import MANIFEST, Manifest, Steps
from .store import LocalStore, Sum, local
from .zarr_format import TREE, ZarrFolder

_BRIDGES = ("torch",)
"""Frameworks with checkpoint formats of their own."""
_NAMES = (TREE, ".metadata")
"""Files that are read where a checkpoint is opened: ours, torch's."""


def latest(path: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint in a folder.

    Args:
        path: that `iso.save` was given.

    Returns:
        The step that was saved last; None if there is no complete checkpoint.

    Raises:
        ValueError: `path` is a URL.

    Example:
        >>> import tempfile, isoshard as iso
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = iso.save(folder, {"epoch": 1}, step=10)
        ...     _ = iso.save(folder, {"epoch": 2}, step=20)
        ...     latest(folder)
        20
    """
    return Steps(LocalStore(local(path))).latest()


def opened(path: str | os.PathLike[str], step: int | None = None) -> Source:
    """Open a checkpoint.

    Args:
        path: see the module.
        step: of the checkpoint, if `path` has several; the newest unless given.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: there is none, or a file of it is missing, truncated or altered.
    """
    return open_and_check(path, step, check_all=True)[0]


def open_and_check(
    path: str | os.PathLike[str], step: int | None = None, *, check_all: bool
) -> tuple[Source, Callable[[int, int], None]]:
    """Open a checkpoint, all or some of whose files are checked later, by several processes.

    Args:
        path: as for `opened`.
        step: likewise.
        check_all: whether all files are checked now.

    Returns:
        The checkpoint, and `check(rank, size)`, which checks this process's share of the remaining
        files.
    """
    text = local(path)
    full_path = Path(text)
    if not full_path.exists():
        raise CheckpointError(f"there is no checkpoint at {text}: it does not exist")
    steps = Steps(LocalStore(text))
    if step is None:
        if full_path.is_file() or (full_path / TREE).exists():
            return _open_folder(str(full_path.parent), full_path.name, check_all)
        latest_step = None if (full_path / ".metadata").exists() else steps.latest()
        if latest_step is None:
            return _open_folder(str(full_path.parent), full_path.name, check_all)
        step = latest_step
    elif step not in steps.all() and (orbax_folder := orbax_format.opened(full_path, step)):
        return orbax_folder, _nothing_left
    return _open_folder(text, steps.folder(step), check_all)


def _nothing_left(rank: int, size: int) -> None:
    """No files are left to check."""


def _open_folder(
    parent: str, name: str, check_all: bool
) -> tuple[Source, Callable[[int, int], None]]:
    """The checkpoint in one folder or file, as from `open_and_check`."""
    store = LocalStore(parent)
    steps = Steps(store)
    manifest = steps.manifest(name)
    files = manifest.files if manifest else {}
    now = files if check_all else {file: files[file] for file in _NAMES if file in files}
    later = [pair for pair in files.items() if pair[0] not in now]

    def check(files: dict[str, Sum]) -> None:
        if errors := steps.check(name, files):
            raise CheckpointError(
                f"the checkpoint in {store.full_path(name)} is damaged, and nothing was restored: "
                f"{'; '.join(errors)}. {_others(steps, name)}"
            )

    check(now)
    return _read(store, steps, name, manifest), lambda n, of: check(dict(later[n::of]))


def _read(store: LocalStore, steps: Steps, name: str, manifest: Manifest | None) -> Source:
    """The reader of a checkpoint in the format of its files."""
    if store.exists(f"{name}/{TREE}"):
        if manifest is None:
            raise CheckpointError(
                f"{store.full_path(name)} is an incomplete checkpoint: it has no "
                f"{MANIFEST}, which is written last. {_others(steps, name)}"
            )
        return ZarrFolder(store, name)
    path = Path(store.full_path(name))
    files = safetensors_format.opened(path) or orbax_format.opened(path)
    if files is not None:
        return files
    missing = []
    for bridge in _BRIDGES:
        try:
            source = require(bridge).open_checkpoint(store.full_path(name))
        except ImportError as error:
            missing.append(str(error))
            continue
        if source is not None:
            return source
    also = f" (not tried: {'; '.join(missing)})" if missing else ""
    raise CheckpointError(
        f"there is no checkpoint at {store.full_path(name)}: neither one that iso.save wrote, nor "
        f"safetensors, nor a folder of Orbax or of torch.distributed.checkpoint{also}"
    )


def _others(steps: Steps, name: str) -> str:
    others = [str(step) for step in steps.all() if str(step) != name.partition(".")[0]]
    if not others:
        return "There is no other checkpoint in the folder."
    return f"The folder also has checkpoints of other steps: {', '.join(others)}."
