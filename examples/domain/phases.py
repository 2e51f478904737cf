"""Two phases that separate: the order parameter of a three-dimensional alloy.

It tends to -1 or 1 in each place, its borders cost energy, and its mean is kept everywhere at once:

    du/dt = stiffness * laplace(u) + f(u) - mean(f(u)),   f(u) = u - u^3

The mean makes every point feel every other one. Nothing flows through the walls. Explicit steps,
second-order differences over a distance of 1, in float64.

>>> u = simulate(np.random.default_rng(0), 2, (8, 4, 4), snapshots=3)
>>> u.shape, u.dtype
((2, 3, 1, 8, 4, 4), dtype('float32'))

Source: Rubinstein and Sternberg, Nonlocal reaction-diffusion equations and nucleation (1992).
"""

from __future__ import annotations

import numpy as np

INTERVAL = 2.0  # of time, between two snapshots
STEP = 0.05  # stable below 1/18
STIFFNESS = 3.0  # of the borders, which are some points wide
SETTLING = 4.0  # of time, before the first snapshot


def simulate(
    rng: np.random.Generator, trajectories: int, grid: tuple[int, int, int], snapshots: int
) -> np.ndarray:
    """Let random fields separate.

    Args:
        rng: for the first fields.
        trajectories: how many, each from another field.
        grid: points along each side.
        snapshots: of each trajectory, `INTERVAL` apart.

    Returns:
        float32[trajectories, snapshots, 1, *grid], between about -1 and 1.
    """
    means = rng.uniform(-0.3, 0.3, size=(trajectories, 1, 1, 1))
    u = means + rng.uniform(-1, 1, size=(trajectories, *grid))
    u = _advanced(u, SETTLING)
    kept = []
    for _ in range(snapshots):
        kept.append(u[:, None])
        u = _advanced(u, INTERVAL)
    return np.stack(kept, 1).astype(np.float32)


def laplace(u: np.ndarray) -> np.ndarray:
    """Second differences along the last three axes, none through the walls.

    Example:
        >>> laplace(np.arange(3.0).reshape(1, 3, 1, 1)).ravel().tolist()
        [1.0, 0.0, -1.0]
    """
    wide = np.pad(u, [(0, 0), (1, 1), (1, 1), (1, 1)], mode="edge")
    inner = slice(1, -1)
    total = -6 * u
    for ends in (slice(None, -2), slice(2, None)):
        total += wide[:, ends, inner, inner]
        total += wide[:, inner, ends, inner]
        total += wide[:, inner, inner, ends]
    return total


def _advanced(u: np.ndarray, time: float) -> np.ndarray:
    for _ in range(round(time / STEP)):
        force = u - u**3
        u = u + STEP * (STIFFNESS * laplace(u) + force - force.mean((1, 2, 3), keepdims=True))
    return u
