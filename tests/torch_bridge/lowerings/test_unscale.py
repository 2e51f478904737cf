"""Gradient scaling against CPU torch."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_unscale_and_look_for_infinities(bad):
    got = []
    for device in ("cpu", "jax"):
        grads = [torch.tensor([2.0, -4.0]), torch.tensor([[8.0]])]
        if bad is not None:
            grads[1][0, 0] = bad
        grads = [grad.to(device) for grad in grads]
        found = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, found, torch.tensor(0.5, device=device)
        )
        got.append([*(grad.cpu() for grad in grads), found.cpu()])
    torch.testing.assert_close(got[1], got[0], equal_nan=True)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("streak", [0, 2])
@pytest.mark.parametrize("scale", [4.0, 3e38])
def test_adapt_the_scale(scale, streak, found):
    got = []
    for device in ("cpu", "jax"):
        value = torch.tensor(scale, device=device)
        count = torch.tensor(streak, dtype=torch.int32, device=device)
        back = torch._amp_update_scale_(
            value, count, torch.tensor(found, device=device), 2.0, 0.5, 3
        )
        assert back is value
        got.append((value.cpu(), count.cpu()))
    torch.testing.assert_close(got[1], got[0])


def test_an_expanded_tensor_is_refused():
    grads = [torch.ones(1, device="jax").expand(3)]
    with pytest.raises(RuntimeError, match="writes to an expanded tensor"):
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, torch.zeros((), device="jax"), torch.ones((), device="jax")
        )
