"""Words between the processes: a small store that JAX's coordination service keeps.

`put` leaves a string under a key, `take` looks or waits for one, `count` counts under one. Each is one
request to that service, which is on rank 0's machine and serves all; `metrics` has how many this
process has made ("store.requests") and what they carried ("store.bytes"). This module is the only
place that touches JAX's client of it, which has no public name (`core/runtime/_jax_internals.py`).

Without `iso.distributed.init_distributed`, or `jax.distributed.initialize`, there is nothing to talk to:

>>> put("a", "b")
Traceback (most recent call last):
    ...
isoshard.core.errors.DistributedError: the processes do not know of each other yet; call iso.distributed.init_distributed() first
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax

from isoshard.core.errors import DistributedError
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals import (
    devices_have_started,
    distributed_state,
    is_distributed,
)

_SPACE = "isoshard/"


def is_started() -> bool:
    """Whether JAX's distributed runtime runs in this process.

    Example:
        >>> is_started()
        False
    """
    return is_distributed()


def backend_runs() -> bool:
    """Whether JAX has started its devices, after which no other process can be joined."""
    return devices_have_started()


def address() -> str | None:
    """Host and port of the coordination service, if it is known here."""
    return getattr(distributed_state, "coordinator_address", None)


def rank_and_size() -> tuple[int, int]:
    """Number of this process and of all; does not start the devices."""
    if not is_distributed():
        return 0, 1
    return distributed_state.process_id, distributed_state.num_processes


def put(key: str, value: str) -> None:
    """Leave `value` under `key`, once.

    Args:
        key: any string; isoshard's keys do not collide with others'.
        value: any string.

    Raises:
        DistributedError: there is no coordination service, or it is gone, or the key is taken.
    """
    if not put_first(key, value):
        raise DistributedError(f"the coordination service has a value of {key!r} already")


def put_first(key: str, value: str) -> bool:
    """Leave `value` under `key`, unless somebody has left another one there.

    Args:
        key: as for `put`.
        value: as for `put`.

    Returns:
        Whether it is this value that is there.

    Raises:
        DistributedError: there is no coordination service, or it is gone.
    """
    client = _client()
    _note(key, value)
    try:
        client.key_value_set(_SPACE + key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise DistributedError(f"the coordination service did not take {key!r}: {error}") from None
    return True


def count(key: str, by: int = 1) -> int:
    """Add to the number under `key`, which is 0 at first.

    Args:
        key: of a number; not one that was given to `put`.
        by: how much; 0 reads it.

    Returns:
        The number after that.

    Raises:
        DistributedError: there is no coordination service, or it is gone.
    """
    client = _client()
    _note(key, "8 bytes.")
    try:
        return client.key_value_increment(_SPACE + key, by)
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"the coordination service did not count {key!r}: {error}") from None


def all_below(key: str) -> dict[str, str]:
    """What stands below a key now, in one request.

    Args:
        key: the keys "KEY/.." are meant.

    Returns:
        The values by what follows "KEY/".

    Raises:
        DistributedError: there is no coordination service, or it is gone.
    """
    client, start = _client(), f"{_SPACE}{key}/"
    try:
        found = client.key_value_dir_get(start)
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"the coordination service did not answer: {error}") from None
    _note(key, "".join(value for _, value in found))
    return {name.removeprefix(start): value for name, value in found}


def take(key: str, timeout: float | None = None) -> str | None:
    """The value of `key`.

    Args:
        key: as given to `put`.
        timeout: seconds to wait for it; None does not wait.

    Returns:
        The value, or None if nobody has put one, or puts one in time.

    Raises:
        DistributedError: there is no coordination service, or it is gone.
    """
    client, name = _client(), _SPACE + key
    try:
        if timeout is None:
            found = client.key_value_try_get(name)
        else:
            found = client.blocking_key_value_get(name, max(1, int(timeout * 1000)))
    except jax.errors.JaxRuntimeError as error:
        _note(key, "")
        if ("NOT_FOUND" if timeout is None else "DEADLINE_EXCEEDED") in str(error):
            return None
        raise DistributedError(f"the coordination service did not answer: {error}") from None
    _note(key, found)
    return found


def forget(key: str) -> None:
    """Remove a key and all keys below it."""
    _note(key, "")
    _client().key_value_delete(_SPACE + key)


def _note(key: str, value: str) -> None:
    metrics.count("store.requests")
    metrics.count("store.bytes", len(_SPACE) + len(key.encode()) + len(value.encode()))


def _client() -> Any:
    client = distributed_state.client
    if client is None:
        raise DistributedError(
            "the processes do not know of each other yet; call "
            "iso.distributed.init_distributed() first"
        )
    return client


def keep_preemption(keep: bool) -> None:
    """Whether JAX's preemption service is started too; it catches SIGTERM.

    `jax_enable_preemption_service` is an option of jax 0.9 and later; one without it has none.
    """
    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", keep)
