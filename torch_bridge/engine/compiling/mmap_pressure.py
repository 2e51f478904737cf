"""How much room the operating system leaves for compiled programs.

On CPUs XLA keeps each program in memory mappings of its own, some for a small program and hundreds
for a training step. Linux allows a process 65,530 of them (`vm.max_map_count`), and a compiler that
gets no more ends the process. So programs are dropped in time.
"""

from __future__ import annotations

from pathlib import Path

_MAPS = Path("/proc/self/maps")
_LIMIT = Path("/proc/sys/vm/max_map_count")
SHARE = 0.5
"""Of the mappings that are allowed: above it there is no room for more programs."""


def crowded() -> bool:
    """Whether programs should be dropped; never on systems that do not tell."""
    try:
        allowed = int(_LIMIT.read_text())
        used = _MAPS.read_bytes().count(b"\n")
    except OSError:
        return False
    return used > SHARE * allowed
