"""The fused linear cross entropy against CPU torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import isoshard.torch_bridge  # noqa: F401  (registers the device)

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no linear_cross_entropy"
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients(reduction, weighted):
    source = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (5, 4), (5,))
    leaves = [torch.randn(shape, generator=source) for shape in shapes]
    target = torch.tensor([0, 4, 2, -100, 1, 2])
    weight = torch.rand(5, generator=source) if weighted else None
    smoothing = 0.1 if reduction == "mean" else 0.0
    got = []
    for device in ("cpu", "jax"):
        x, matrix, bias = (leaf.detach().to(device).requires_grad_() for leaf in leaves)
        loss = F.linear_cross_entropy(
            x,
            matrix,
            target.to(device),
            linear_bias=bias,
            weight=None if weight is None else weight.to(device),
            reduction=reduction,
            label_smoothing=smoothing,
            options=F.LinearCrossEntropyOptions(batch_chunk_size=2)
            if hasattr(F, "LinearCrossEntropyOptions")
            else None,
        )
        loss.sum().backward()
        got.append([loss.detach().cpu(), x.grad.cpu(), matrix.grad.cpu(), bias.grad.cpu()])
    torch.testing.assert_close(got[1], got[0], rtol=1e-4, atol=1e-5)
