"""SPMD mode and automatic sharding, as torch_xla's scripts switch them on.

isoshard has one mode of work, torch_xla's SPMD: one process, one logical device, meshes. The
switch for SPMD only records what a script asked for, so that it reads back what it expects. The
one for automatic sharding lets the first call of a compiled step find a plan for it.

Environment: `XLA_USE_SPMD=1` and `XLA_AUTO_SPMD=1` switch them on as well, and `use_spmd` sets
them, so that processes started later agree.
"""

from __future__ import annotations

import os

from . import unplanned_steps


def use_spmd(auto: bool | None = False) -> None:
    """Say that the script is written for SPMD. It cannot be taken back, as in torch_xla.

    Args:
        auto: also lay out what nobody marked, by the plan that is found for the first step that
            `torch_xla.compile` or `xs.compile` makes.
    """
    os.environ["XLA_USE_SPMD"] = "1"
    if auto:
        os.environ["XLA_AUTO_SPMD"] = "1"
        unplanned_steps.watch()


def is_spmd() -> bool:
    """Whether `use_spmd` was called, or `XLA_USE_SPMD` is set."""
    return check_env_flag("XLA_USE_SPMD")


def auto_spmd() -> bool:
    """Whether `use_spmd(auto=True)` was called, or `XLA_AUTO_SPMD` is set."""
    return check_env_flag("XLA_AUTO_SPMD")


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether an environment variable is `true` or a number above 0.

    Args:
        name: of the variable.
        default: what it is if it is not set.
    """
    flag = os.environ.get(name, default)
    return flag == "true" or (flag.isdigit() and int(flag) > 0)
