"""A compilation cache on disk: what one process compiled, the next one reads.

    import isoshard as iso
    iso.compilation_cache()                 # ~/.cache/isoshard, or the folder you name

This is JAX's own persistent cache, switched on for every program, however small, and also for the
JAX functions of this process. A program is found again when its computation, its shardings, the
devices and the versions of JAX and XLA are the same. `isoshard.metrics` counts what was read there
as "cache_hits".

Source: JAX's guide "Persistent compilation cache".
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from ._jax_internals import compilation

_NEVER = 1e9  # seconds
_HIT = "/jax/compilation_cache/cache_hits"
_hits = 0
_listening = False


def compilation_cache(
    folder: str | os.PathLike[str] | None = None, *, readonly: bool = False
) -> Path:
    """Keep compiled programs on disk, for this process and later ones.

    Call it at any time; programs compiled before are not in it. Nothing is ever deleted: remove the
    folder to empty the cache.

    Args:
        folder: where; it is made if it is not there. By default `isoshard` in the user's cache
            folder (`$XDG_CACHE_HOME`, else `~/.cache`).
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
    global _listening
    reset, listen = compilation.RESET_CACHE.resolve(), compilation.EVENT_LISTENER.resolve()
    path = Path(folder) if folder is not None else _default()
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
    jax.config.update("jax_compilation_cache_dir", str(path))
    # What compiles faster than this is not written; reading does not depend on it.
    shortest = _NEVER if readonly else 0.0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    reset()  # JAX decides at its first compilation whether there is a cache
    if not _listening:
        listen(_listen)
        _listening = True
    return path


def hits() -> int:
    """How many programs this process has read from the cache."""
    return _hits


def _default() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "isoshard"


def _listen(event: str, **_: object) -> None:
    global _hits
    _hits += event == _HIT
