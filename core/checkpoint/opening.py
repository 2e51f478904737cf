"""Finding a checkpoint behind a path, and checking its files before anything is read.

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
        The step that was saved last; None if there is no whole checkpoint.

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
        step: which one, if `path` holds several; the newest unless given.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: there is none, or a file of it is missing, truncated or altered.
    """
    return opened_in_parts(path, step, whole=True)[0]


def opened_in_parts(
    path: str | os.PathLike[str], step: int | None = None, *, whole: bool
) -> tuple[Source, Callable[[int, int], None]]:
    """Open a checkpoint, whose files several processes check together.

    Args:
        path: as for `opened`.
        step: likewise.
        whole: whether all files are checked at once.

    Returns:
        The checkpoint, and `check(rank, size)`, which checks this process's share of the files that
        were not.
    """
    text = local(path)
    here = Path(text)
    if not here.exists():
        raise CheckpointError(f"there is no checkpoint at {text}: it does not exist")
    steps = Steps(LocalStore(text))
    if step is None:
        if here.is_file() or (here / TREE).exists():
            return _one(str(here.parent), here.name, whole)
        found = None if (here / ".metadata").exists() else steps.latest()
        if found is None:
            return _one(str(here.parent), here.name, whole)
        step = found
    elif step not in steps.all() and (found_by_orbax := orbax_format.opened(here, step)):
        return found_by_orbax, _nothing_left
    return _one(text, steps.folder(step), whole)


def _nothing_left(rank: int, size: int) -> None:
    """No files are left to check."""


def _one(parent: str, name: str, whole: bool) -> tuple[Source, Callable[[int, int], None]]:
    """The checkpoint in one folder, or file."""
    store = LocalStore(parent)
    steps = Steps(store)
    manifest = steps.manifest(name)
    files = manifest.files if manifest else {}
    now = files if whole else {file: files[file] for file in _NAMES if file in files}
    later = [pair for pair in files.items() if pair[0] not in now]

    def check(files: dict[str, Sum]) -> None:
        if faults := steps.check(name, files):
            raise CheckpointError(
                f"the checkpoint in {store.full_path(name)} is damaged, and nothing was restored: "
                f"{'; '.join(faults)}. {_others(steps, name)}"
            )

    check(now)
    return _read(store, steps, name, manifest), lambda n, of: check(dict(later[n::of]))


def _read(store: LocalStore, steps: Steps, name: str, manifest: Manifest | None) -> Source:
    """The checkpoint in a folder whose names are as they were written."""
    if store.exists(f"{name}/{TREE}"):
        if manifest is None:
            raise CheckpointError(
                f"{store.full_path(name)} is what is left of a checkpoint: it has no "
                f"{MANIFEST}, which is written last. {_others(steps, name)}"
            )
        return ZarrFolder(store, name)
    here = Path(store.full_path(name))
    files = safetensors_format.opened(here) or orbax_format.opened(here)
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
        return "There is no other checkpoint beside it."
    return f"Beside it are the checkpoints of other steps: {', '.join(others)}."
