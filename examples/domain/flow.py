"""A flow in a box: the vorticity of a two-dimensional fluid between four slippery walls.

Vorticity w is carried by the flow that it makes itself, and is smoothed by viscosity:

    dw/dt + u dw/dx + v dw/dy = viscosity * laplace(w),   laplace(psi) = -w,   (u, v) = rot(psi)

It is 0 at the walls. The field of the box, mirrored with the opposite sign in each wall, is
periodic and stays so; it is solved by Fourier's series with 2/3 of the waves, and fourth-order
Runge-Kutta steps, in float64.

>>> w = simulate(np.random.default_rng(0), 2, 16, snapshots=3)
>>> w.shape, w.dtype
((2, 3, 1, 16, 16), dtype('float32'))

Source: Orszag, On the elimination of aliasing in finite-difference schemes by filtering
high-wavenumber components (1971).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

VISCOSITY = 1e-3
INTERVAL = 1.0  # of time, between two snapshots; the box is pi wide
SUBSTEPS = 8
WAVES = (2, 6)  # of the first field


def simulate(
    rng: np.random.Generator, trajectories: int, points: int, snapshots: int
) -> np.ndarray:
    """Let random fields flow.

    Args:
        rng: for the first fields.
        trajectories: how many, each from another field.
        points: along each side of the box.
        snapshots: of each trajectory, `INTERVAL` apart.

    Returns:
        float32[trajectories, snapshots, 1, points, points], vorticity.
    """
    change = _right_side(points)
    w = np.fft.rfft2(mirrored(_first(rng, trajectories, points)))
    kept = []
    for _ in range(snapshots):
        kept.append(np.fft.irfft2(w)[:, None, :points, :points])
        for _ in range(SUBSTEPS):
            w = _runge_kutta(change, w, INTERVAL / SUBSTEPS)
    return np.stack(kept, 1).astype(np.float32)


def mirrored(field: np.ndarray) -> np.ndarray:
    """Add to a field of the box its mirror images with the opposite sign.

    Args:
        field: [.., points, points].

    Returns:
        [.., 2 points, 2 points].

    Example:
        >>> mirrored(np.array([[1.0, 2.0], [3.0, 4.0]])).astype(int).tolist()
        [[1, 2, -2, -1], [3, 4, -4, -3], [-3, -4, 4, 3], [-1, -2, 2, 1]]
    """
    wide = np.concatenate([field, -field[..., ::-1]], -1)
    return np.concatenate([wide, -wide[..., ::-1, :]], -2)


def _first(rng: np.random.Generator, trajectories: int, points: int) -> np.ndarray:
    """Sums of a few standing waves, of root mean square 1."""
    low, high = WAVES
    places = np.pi * (np.arange(points) + 0.5) / points
    sines = np.sin(np.arange(low, high)[:, None] * places)
    weights = rng.normal(size=(trajectories, high - low, high - low))
    field = np.einsum("tab,ax,by->txy", weights, sines, sines)
    return field / np.sqrt((field**2).mean((1, 2), keepdims=True))


def _right_side(points: int) -> Callable[[np.ndarray], np.ndarray]:
    """What changes the waves of the vorticity, as a function of them."""
    waves = np.fft.fftfreq(2 * points, 1 / (2 * points))
    ky, kx = waves[:, None], waves[None, : points + 1]
    square = kx**2 + ky**2
    kept = (abs(ky) < 2 * points / 3) & (abs(kx) < 2 * points / 3)
    inverse = np.where(square == 0, 0.0, 1 / np.maximum(square, 1))

    def change(w: np.ndarray) -> np.ndarray:
        psi = w * inverse
        waves = [1j * ky * psi, -1j * kx * psi, 1j * kx * w, 1j * ky * w]
        u, v, dx, dy = np.fft.irfft2(np.stack(waves))
        return -(kept * np.fft.rfft2(u * dx + v * dy)) - VISCOSITY * square * w

    return change


def _runge_kutta(
    change: Callable[[np.ndarray], np.ndarray], w: np.ndarray, step: float
) -> np.ndarray:
    first = change(w)
    second = change(w + step / 2 * first)
    third = change(w + step / 2 * second)
    fourth = change(w + step * third)
    return w + step / 6 * (first + 2 * second + 2 * third + fourth)
