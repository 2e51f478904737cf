"""A compilation cache on disk: what one process compiled, the next one reads.

    import isoshard as iso
    iso.compilation_cache()                 # ~/.cache/isoshard/programs, or the folder you name

This is JAX's own persistent cache. `by_default` switches it on when the torch bridge compiles its
first program, for programs that take longer than a second, unless the user has chosen: with
`isoshard.compilation_cache`, JAX's settings (`jax_compilation_cache_dir`,
`jax_enable_compilation_cache`), or the variable `ISOSHARD_COMPILATION_CACHE` (another folder; 0
for none). It holds 4 GiB at most; JAX removes what was not used for longest.

A program is found again when its computation, its shardings, the devices and the versions of JAX
and XLA are the same. `isoshard.metrics` counts what was read there as "cache_hits".

Several processes may use one folder: JAX takes a lock for each entry that it reads or writes. An
entry whose process ended while it wrote has no time of use, and is removed here.

**Several virtual CPU devices.** XLA mixes up collectives of programs that it has read from disk: of
66 runs of a training step through a ring of attention, read from a shared folder, 12 gave wrong
values or ended the process with JAX 0.10.2, and 1 of 24 with 0.12.0; compiled anew, none. There the
cache is off by default, and one that the user has chosen is a warning.

Source: JAX's guide "Persistent compilation cache".
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import time
import warnings
from pathlib import Path

import jax

from ._jax_internals import compilation

VARIABLE = "ISOSHARD_COMPILATION_CACHE"
LIMIT = 4 << 30
"""Bytes in the user's folder: some hundred steps of a language model."""

_VIRTUAL = (
    "the compilation cache {} is used on several virtual CPU devices, where XLA mixes up "
    "collectives of programs that it reads from disk: values may be wrong. Set "
    "JAX_ENABLE_COMPILATION_CACHE=0, or use the cache on one device or on accelerators only"
)
_NEVER = 1e9  # seconds
_TORN = 60.0
"""Seconds after which an entry without a time of use is no longer being written."""

_HIT = "/jax/compilation_cache/cache_hits"
_hits = 0
_listening = False
_decided = False
_log = logging.getLogger("isoshard")


def compilation_cache(
    folder: str | os.PathLike[str] | None = None, *, readonly: bool = False
) -> Path:
    """Keep compiled programs on disk, for this process and later ones.

    Call it at any time; programs compiled before are not in it. All programs are kept, however
    small, those of JAX functions as well. In a folder that you name nothing is ever deleted.

    Args:
        folder: where; it is made if it is not there. By default `isoshard/programs` in the user's
            cache folder (`$XDG_CACHE_HOME`, else `~/.cache`), with at most 4 GiB.
        readonly: read programs that other processes keep there, and write none.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be made or written to; or it is not there, and `readonly`.

    Example:
        >>> before = jax.config.jax_compilation_cache_dir
        >>> compilation_cache("compiled").name
        'compiled'
        >>> jax.config.update("jax_compilation_cache_dir", before)      # and off again
    """
    path = Path(folder) if folder is not None else _users_folder()
    path = path.expanduser().absolute()
    if readonly and not path.is_dir():
        raise FileNotFoundError(f"there is no compilation cache {path} to read from")
    if not readonly:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(
                f"the compilation cache {path} cannot be written to; name another, or pass "
                "readonly=True"
            )
    # What compiles faster than this is not written; reading does not depend on it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _NEVER if readonly else 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    _use(path, LIMIT if folder is None and _locks(path) else -1)
    return path


def by_default() -> None:
    """Switch the cache on in the user's folder, unless the user has chosen, or it cannot be."""
    global _decided
    if _decided:
        return
    _decided = True
    if not jax.config.jax_enable_compilation_cache:
        return
    chosen, named = jax.config.jax_compilation_cache_dir, os.environ.get(VARIABLE)
    virtual = jax.device_count() > 1 and jax.devices()[0].platform == "cpu"
    if chosen and virtual:
        warnings.warn(_VIRTUAL.format(chosen), stacklevel=2)
    if chosen or virtual or named == "0":
        return
    path = Path(named).expanduser().absolute() if named else _users_folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK) and _locks(path)
    except OSError as error:
        _log.info("no compilation cache on disk: %s", error)
        return
    if not usable:
        _log.info("no compilation cache on disk: %s cannot be written to or locked", path)
        return
    _remove_torn(path)
    _use(path, LIMIT)


def hits() -> int:
    """How many programs this process has read from the cache."""
    return _hits


def _users_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "isoshard" / "programs"


def _use(path: Path, limit: int) -> None:
    """Let JAX keep programs in a folder.

    Args:
        path: the folder.
        limit: bytes that it holds at most; -1 for no limit.
    """
    global _listening
    reset, listen = compilation.RESET_CACHE.resolve(), compilation.EVENT_LISTENER.resolve()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", limit)
    reset()  # JAX decides at its first compilation whether there is a cache
    if not _listening:
        listen(_listen)
        _listening = True


def _locks(path: Path) -> bool:
    """Whether JAX can lock a folder: with `filelock`, on a file system that has locks."""
    if importlib.util.find_spec("filelock") is None:  # torch requires it
        return False
    try:
        with (path / ".lockfile").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process holds it
        return True
    except OSError:
        return False
    return True


def _remove_torn(path: Path) -> None:
    """Remove entries that were never finished: JAX would warn of each in every process."""
    now = time.time()
    for entry in path.glob("*-cache"):
        used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not used.exists() and now - entry.stat().st_mtime > _TORN:
                entry.unlink()


def _listen(event: str, **_: object) -> None:
    global _hits
    _hits += event == _HIT
