"""What the networks learn from is right: exact solutions, and what is conserved."""

import numpy as np
import pytest

from examples.domain import flow, phases


def test_a_standing_wave_only_decays(monkeypatch):
    points = 16
    places = np.pi * (np.arange(points) + 0.5) / points
    wave = np.sin(3 * places)[:, None] * np.sin(2 * places)
    monkeypatch.setattr(flow, "_first", lambda *_: wave[None])
    monkeypatch.setattr(flow, "VISCOSITY", 0.05)
    found = flow.simulate(np.random.default_rng(0), 1, points, 3)[0, :, 0]
    wanted = [np.exp(-0.05 * 13 * flow.INTERVAL * number) * wave for number in range(3)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_without_viscosity_energy_and_enstrophy_stay(monkeypatch):
    monkeypatch.setattr(flow, "VISCOSITY", 0.0)
    w = flow.simulate(np.random.default_rng(0), 2, 32, 3)[:, :, 0].astype(np.float64)
    waves = np.fft.fft2(flow.mirrored(w))
    k = np.fft.fftfreq(64, 1 / 64)
    square = k[:, None] ** 2 + k**2
    energy = (abs(waves) ** 2 / np.maximum(square, 1)).sum((2, 3))
    np.testing.assert_allclose(energy, energy[:, :1].repeat(3, 1), rtol=1e-3)
    assert abs(w[:, 2] - w[:, 0]).max() > 0.5


def test_half_the_step_gives_the_same_flow(monkeypatch):
    whole = flow.simulate(np.random.default_rng(0), 1, 32, 3)
    monkeypatch.setattr(flow, "SUBSTEPS", 2 * flow.SUBSTEPS)
    np.testing.assert_allclose(flow.simulate(np.random.default_rng(0), 1, 32, 3), whole, atol=2e-3)


def test_phases_keep_their_mean_and_separate():
    u = phases.simulate(np.random.default_rng(0), 3, (16, 8, 8), 5)
    means = u.mean((2, 3, 4, 5))
    np.testing.assert_allclose(means, means[:, :1].repeat(5, 1), atol=1e-6)
    spread = u.std((0, 2, 3, 4, 5))
    assert spread[-1] > 1.5 * spread[0]
    assert abs(u).max() < 1.2


def test_borders_flatten_with_the_known_rate():
    places = np.arange(8) + 0.5
    wave = np.cos(np.pi * places / 8).reshape(1, 8, 1, 1)
    rate = 2 * np.cos(np.pi / 8) - 2
    np.testing.assert_allclose(phases.laplace(wave), rate * wave, atol=1e-12)
    assert phases.laplace(wave).sum() == pytest.approx(0, abs=1e-12)
