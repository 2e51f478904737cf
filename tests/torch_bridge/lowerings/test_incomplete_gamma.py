"""P(a, x) and Q(a, x) in 32 bits against float64 on the CPU."""

import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401

ENDS = [0.0, -0.0, 1.0, -1.0, 30.0, 300.0, 1e30, float("inf"), float("nan")]


@pytest.mark.parametrize("part", [torch.special.gammainc, torch.special.gammaincc])
@pytest.mark.parametrize(("low", "high"), [(1e-3, 20), (20, 200), (200, 3e3), (3e3, 1e6)])
def test_near_its_step(part, low, high):
    random = np.random.default_rng(0)
    a = random.uniform(low, high, 4000)
    x = a * (1 + random.normal(size=4000) * np.minimum(0.2, 3 / np.sqrt(a)))
    a, x = (torch.tensor(values, dtype=torch.float32) for values in (a, x.clip(0)))
    have = part(a.to("jax"), x.to("jax")).cpu().double()
    torch.testing.assert_close(have, part(a.double(), x.double()), rtol=5e-5, atol=4e-6)


@pytest.mark.parametrize("part", [torch.special.gammainc, torch.special.gammaincc])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_at_the_ends(part, dtype):
    values = torch.tensor(ENDS, dtype=dtype)
    a, x = torch.meshgrid(values, values, indexing="ij")
    have = part(a.to("jax"), x.to("jax")).cpu()
    torch.testing.assert_close(have, part(a, x), equal_nan=True, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("part", [torch.special.gammainc, torch.special.gammaincc])
def test_in_64_bits(part):
    """CPU torch is itself 7e-10 off here."""
    random = np.random.default_rng(0)
    a = random.uniform(500, 1e5, 4000)
    a, x = torch.tensor(a), torch.tensor(a * (1 + random.normal(size=4000) * 3 / np.sqrt(a)))
    torch.testing.assert_close(
        part(a.to("jax"), x.to("jax")).cpu(), part(a, x), rtol=2e-9, atol=1e-12
    )
