"""Room for the connections of a large run: systems begin with 1,024 open files for a process.

Rank 0 keeps about five connections to each other rank (JAX's service and collectives, torch's store
and gloo, the watch), each other rank two; `python -m benchmarks.cost_of_scale` counts them. Beyond
some 200 ranks they are more than a process is allowed at first, and runtimes then fail with messages
of their own. Every process may raise that number up to a second one, which is usually large.
"""  # noqa: E501

from __future__ import annotations

import resource
import warnings

from isoshard.core.errors import ClusterWarning

FIRST, OTHER = 6, 3
"""Connections for each other rank, of rank 0 and of any."""
_OWN = 512  # files of the script itself, its data and libraries


def make_room(rank: int, size: int) -> int:
    """Raise this process's limit of open files, if its run has more connections.

    Args:
        rank: number of this process.
        size: number of processes.

    Returns:
        The limit now; -1 if there is none. A `ClusterWarning` says if it is too low still.

    Example:
        >>> make_room(0, 2) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        True
    """
    needed = _OWN + (OTHER if rank else FIRST) * size
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return limit
    limit = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    if limit < needed:
        warnings.warn(
            f"rank {rank} of {size} may open {limit} files, and its connections need some "
            f"{needed}: raise the machine's limit (ulimit -Hn, LimitNOFILE= of systemd, or "
            "/etc/security/limits.conf)",
            ClusterWarning,
            stacklevel=3,
        )
    return limit
