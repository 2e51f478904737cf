"""What classifiers of images train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def loss(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(module(images), labels)


def batch(size: Any, number: int) -> tuple[np.ndarray, ...]:
    """Noise with a label from its mean brightness; `size` has classes, batch and image."""
    rng = np.random.default_rng(number)
    labels = rng.integers(0, size.classes, size.batch)
    images = rng.standard_normal((size.batch, 3, size.image, size.image), np.float32)
    shift = (labels / size.classes - 0.5).astype(np.float32)
    return images + shift[:, None, None, None], labels
