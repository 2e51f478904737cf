"""Fourier transforms against CPU torch, with every scale, and more axes than XLA takes at once."""

from __future__ import annotations

import torch

from tests.torch_bridge.lowerings.harness import together

aten = torch.ops.aten


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_transforms():
    x = torch.complex(signal(3, 4, 5), signal(3, 4, 5, seed=1))
    many = torch.complex(signal(2, 3, 2, 3, 4), signal(2, 3, 2, 3, 4, seed=1))
    with together() as check:
        for normalization in (0, 1, 2):
            for forward in (True, False):
                check(aten._fft_c2c.default, x, [0, 2], normalization, forward)
        for onesided in (True, False):
            for dims in ([1], [0, 2], [2, 0]):
                check(aten._fft_r2c.default, signal(3, 4, 5), dims, 1, onesided)
        for size in (6, 7):
            half = torch.fft.rfftn(signal(3, 4, size))
            check(aten._fft_c2r.default, half, [0, 1, 2], 2, size)
        # More axes than XLA transforms at once.
        check(aten._fft_c2c.default, many, [0, 1, 2, 3, 4], 1, True, atol=1e-4)
        real = many.real.contiguous()
        check(aten._fft_r2c.default, real, [0, 1, 2, 3, 4], 0, True, atol=1e-4)


def test_gradient_of_a_spectrum():
    x = signal(6)
    grads = []
    for leaf in (x.clone().requires_grad_(), x.to("jax").requires_grad_()):
        torch.fft.rfft(leaf).abs().square().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_conjugate_is_a_view():
    x = torch.complex(signal(4), signal(4, seed=1))
    for leaf in (x, moved := x.to("jax")):
        leaf.conj()[:2].mul_(2j)
        leaf.imag.neg().add_(1)
    torch.testing.assert_close(moved.cpu(), x)
