"""CTC loss against CPU torch: padded and joined targets, lengths as lists and as tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import isoshard.torch_bridge  # noqa: F401  (registers the device)

STEPS, BATCH, CLASSES = 12, 3, 5
INPUTS, TARGETS = (12, 9, 7), (4, 0, 3)


def scores() -> torch.Tensor:
    made = torch.randn(STEPS, BATCH, CLASSES, generator=torch.Generator().manual_seed(0))
    return made.log_softmax(2)


def labels(joined: bool) -> torch.Tensor:
    padded = torch.tensor([[1, 1, 2, 4], [0, 0, 0, 0], [3, 2, 3, 0]])
    if not joined:
        return padded
    return torch.cat([row[:size] for row, size in zip(padded, TARGETS, strict=True)])


def both(**options):
    """Losses and gradients of CPU torch and of the `jax` device."""
    got = []
    for device in ("cpu", "jax"):
        x = scores().to(device).detach().requires_grad_()
        joined = options.get("joined", False)
        lengths = INPUTS, options.get("targets", TARGETS)
        if options.get("tensors"):
            lengths = tuple(torch.tensor(each).to(device) for each in lengths)
        loss = F.ctc_loss(
            x,
            labels(joined).to(device),
            *lengths,
            blank=options.get("blank", 0),
            reduction=options.get("reduction", "mean"),
            zero_infinity=options.get("zero_infinity", False),
        )
        loss.sum().backward()
        got.append((loss.detach().cpu(), x.grad.cpu()))
    return got


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_loss_and_gradient(joined, tensors):
    want, got = both(joined=joined, tensors=tensors, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_another_blank():
    want, got = both(blank=4, targets=(3, 0, 3))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_more_labels_than_time(zero_infinity):
    """Three equal labels need five steps."""
    x = scores()[:3, :2].contiguous()
    target = torch.tensor([[1, 1, 1], [1, 2, 3]])
    got = []
    for device in ("cpu", "jax"):
        leaf = x.detach().to(device).requires_grad_()
        loss = F.ctc_loss(
            leaf, target.to(device), (3, 3), (3, 3), reduction="none", zero_infinity=zero_infinity
        )
        loss[1].backward()
        got.append((loss.detach().cpu(), leaf.grad.cpu()[:, 1]))
    torch.testing.assert_close(got[1], got[0], rtol=1e-4, atol=1e-4)


def test_refusals():
    x, target = scores().to("jax"), labels(False).to("jax")
    with pytest.raises(RuntimeError, match="blank must be in label range"):
        F.ctc_loss(x, target, INPUTS, TARGETS, blank=9)
    with pytest.raises(RuntimeError, match="must be of size 3"):
        F.ctc_loss(x, target, INPUTS[:2], TARGETS)
    with pytest.raises(RuntimeError, match="value at most 12, but got value 40"):
        F.ctc_loss(x, target, (40, 9, 7), TARGETS)
