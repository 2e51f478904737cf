"""A module whose globals the cases change."""

from __future__ import annotations

from typing import Any

import torch

WARMTH: Any = 2.0
TENSOR: Any = None
TABLE = {"warmth": 2.0}


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Reads a tensor of this module."""
    return x * TENSOR


def replaced(x: torch.Tensor) -> torch.Tensor:
    """Is patched by a case."""
    return torch.relu(x)
