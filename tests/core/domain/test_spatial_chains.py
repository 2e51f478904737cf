"""Operators after one another, as in a U-Net: one program for results and gradients."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.domain import (
    avg_pool,
    conv,
    conv_transpose,
    cumsum,
    interpolate,
    max_pool,
    pad,
    roll,
)

from .against_torch import SPLITS, check

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")


@pytest.mark.parametrize("split", ["even", "any", "empty"])
def test_down_and_up(split, mesh, x64):
    def ours(x, w, v, **layout):
        y = conv(x, w, padding=1, mode="wrap", **layout)
        y = max_pool(jax.tree.map(jax.numpy.tanh, y), 3, stride=2, padding=1, **layout)
        y = conv_transpose(y, v, stride=2, padding=1, **layout)
        return interpolate(y, size=21, mode="linear", **layout)

    def theirs(x, w, v):
        y = F.conv1d(F.pad(x, (1, 1), mode="circular"), w)
        y = F.max_pool1d(torch.tanh(y), 3, 2, 1)
        return F.interpolate(F.conv_transpose1d(y, v, None, 2, 1), 21, mode="linear")

    sizes = SPLITS[split]
    x = RNG.normal(size=(2, 2, sum(sizes)))
    operands = RNG.normal(size=(3, 2, 3)), RNG.normal(size=(3, 1, 4))
    check(ours, theirs, x, operands, 2, sizes, mesh, SPEC)


@pytest.mark.parametrize("split", ["any", "empty"])
def test_rows_that_only_move(split, mesh, x64):
    def ours(x, **layout):
        y = roll(pad(x, {2: (3, 2)}, "reflect", **layout), 5, 2, **layout)
        y = pad(roll(y, -2, 2, **layout), {2: (-1, 4)}, **layout)
        return avg_pool(cumsum(y, 2, **layout), 3, stride=2, padding=1, **layout)

    def theirs(x):
        y = F.pad(F.pad(x, (3, 2), mode="reflect").roll(3, 2), (-1, 4))
        return F.avg_pool1d(y.cumsum(2), 3, 2, 1)

    check(ours, theirs, RNG.normal(size=(2, 2, 18)), (), 2, SPLITS[split], mesh, SPEC)
