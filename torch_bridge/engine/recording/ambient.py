"""Modes of torch and JAX that decide what an operation does, and that a captured step finds.

>>> before = ambient()
>>> with torch.no_grad():
...     ambient() == before
False
>>> ambient() == before
True
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import torch
from torch.utils import deterministic

from isoshard.torch_bridge._torch_internals.dispatcher import open_dispatches, open_functions
from isoshard.torch_bridge._torch_internals.undocumented import (
    caches_casts,
    get_autocast_dtype,
    is_anomaly_enabled,
    is_autocast_enabled,
)
from isoshard.torch_bridge.engine.recording import compile_settings


def ambient() -> tuple[Any, ...]:
    """Everything whose change asks for another program, whatever the step's code reads."""
    autocast = is_autocast_enabled("jax")
    return (
        compile_settings.current(),
        jax.config.jax_enable_x64,  # JAX's functions are traced with these three
        jax.config.jax_numpy_dtype_promotion,
        jax.sharding.get_abstract_mesh(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (get_autocast_dtype("jax"), caches_casts()) if autocast else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,  # pyrefly: ignore[missing-attribute]
        torch.get_float32_matmul_precision(),
        is_autocast_enabled("cpu"),
        is_anomaly_enabled(),
        torch.get_num_threads(),
        open_functions(),
        open_dispatches(),
        *_MODES.values(),
    )


_MODES: dict[str, Hashable] = {}


def set_mode(name: str, value: Hashable) -> None:
    """Set a process-wide mode of another package that captured steps depend on.

    The package sets it when it changes, so that a replay calls none of its functions.
    """
    _MODES[name] = value
