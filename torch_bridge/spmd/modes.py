"""SPMD mode and automatic sharding, as torch_xla's scripts enable them.

isoshard always works as torch_xla in SPMD mode: one process, one logical device, meshes. `use_spmd`
only records that a script enabled it, for `is_spmd`. Automatic sharding lets the first call of a
compiled step search a plan for it.

Environment: `XLA_USE_SPMD=1` and `XLA_AUTO_SPMD=1` enable them as well, and `use_spmd` sets both
variables, so that processes started later agree.
"""

from __future__ import annotations

import os

from . import unplanned_steps


def use_spmd(auto: bool | None = False) -> None:
    """Enable SPMD mode. It cannot be disabled, as in torch_xla.

    Args:
        auto: also shard tensors that are not marked, by the plan that is found for the first step
            of `torch_xla.compile` or `xs.compile`.
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
    """Whether an environment variable is `true` or a number above 0."""
    flag = os.environ.get(name, default)
    return flag == "true" or (flag.isdigit() and int(flag) > 0)
