"""Chains of torch operators on drawn shapes and splits, against the CPU in float64.

Forward and backward; the first link makes every padding NaN.
"""

import torch
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.domain.drawn import cases


def poison(x):
    return torch.where(x != 0, x * x / x, torch.zeros_like(x))


def written(x):
    y = x.clone()
    y[1:3] = 0.5
    y[0].mul_(2)
    return y


LINKS = {
    "tanh": torch.tanh,
    "centre": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "cumsum": lambda x: x.cumsum(0) / len(x),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(2, 0),
    "turn": lambda x: x.t(),
    "gram": lambda x: x @ (x.t() @ x) / x.numel(),
    "outer": lambda x: torch.tanh(x @ x.t()) @ x / len(x),
    "fold": lambda x: x.flatten().flip(0).view(x.shape),
    "cut": lambda x: torch.cat([x[1:], 2 * x[:1]]),
    "sorted": lambda x: x.sort(0).values,
    "conv": lambda x: F.conv1d(x.t()[:, None], x.new_ones(1, 1, 3), padding=1)[:, 0].t() / 3,
    "pool": lambda x: F.max_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    "smooth": lambda x: F.avg_pool1d(F.pad(x.t()[None], (1, 1), "replicate"), 3, 1)[0].t(),
    "resize": lambda x: F.interpolate(x.t()[None], size=len(x), mode="linear")[0].t(),
    "attend": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "write": written,
}


def run(links, x):
    y = poison(x)
    for link in links:
        y = LINKS[link](y)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    (y * weights.to(y.dtype).to(y.device)).sum().backward()
    return y.detach(), x.grad


@settings(max_examples=1, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(LINKS, least=3, most=4))
def test_chains(case):
    (shape, names), spec, sizes, extents, links = case
    x = torch.randn(extents, generator=torch.Generator().manual_seed(0))
    mesh = iso.make_mesh(shape, names)
    t = iso.shard(x, mesh, spec, uneven="pad", sizes=sizes).requires_grad_()
    found, gradient = run(links, t)
    xs.sync()
    want, want_gradient = run(links, x.double().requires_grad_())
    assert torch.allclose(found.cpu().double(), want, rtol=1e-4, atol=1e-4)
    assert torch.allclose(gradient.cpu().double(), want_gradient, rtol=1e-3, atol=1e-3)
    assert gradient.block_sizes == t.block_sizes
