"""`scan`: what is refused, and why."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.experimental.scan import scan


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.clone().to(device).requires_grad_()


def test_mistakes():
    x, zero = torch.ones(3, 2, device="jax"), torch.zeros((), device="jax")
    with pytest.raises(ValueError, match=r"scan takes a function fn\(carry, x\), not 3"):
        scan(3, zero, x)
    with pytest.raises(ValueError, match="at least one tensor in xs"):
        scan(lambda c, x: (c, x), zero, {"a": None})
    with pytest.raises(ValueError, match=r"xs\['a'\] has 3, xs\['b'\] has 4"):
        scan(lambda c, x: (c, None), zero, {"a": x, "b": torch.ones(4, device="jax")})
    with pytest.raises(ValueError, match="has no axes"):
        scan(lambda c, x: (c, None), zero, zero)
    with pytest.raises(TypeError, match=r"init\[1\] is on cpu; move it"):
        scan(lambda c, x: (c, None), (zero, torch.ones(1)), x)
    with pytest.raises(
        TypeError, match=r"init\['h'\] is \(2,\) torch.float32, the new one \(2, 2\)"
    ):
        scan(lambda c, x: ({"h": x.expand(2, 2)}, None), {"h": x[0]}, x)
    with pytest.raises(
        TypeError, match=r"init is \(\) torch.float32, the new one \(\) torch.int64"
    ):
        scan(lambda c, x: (c.long(), None), zero, x)
    with pytest.raises(TypeError, match="must return a carry like the one it takes"):
        scan(lambda c, x: ((c, c), None), zero, x)
    with pytest.raises(TypeError, match=r"must return \(carry, y\), and returned XLAShardedTensor"):
        scan(lambda c, x: c, zero, x)
    with pytest.raises(ValueError, match=r"works on a torch\.fx graph"):
        scan(lambda c, x: (c, x), zero, x, partition_fn=lambda *args: None)
    with pytest.raises(
        ValueError, match=r"writes to its arguments in place \(\(2,\) torch.float32\)"
    ):
        scan(lambda c, x: (c, x.add_(1)), zero, x)
    with pytest.raises(RuntimeError, match="needs the value of a tensor that is not computed yet"):
        scan(lambda c, x: (c, x if x.sum() > 0 else -x), zero, x)
    kept = []
    scan(lambda c, x: (c, kept.append(x * 2)), zero, x)
    with pytest.raises(RuntimeError, match="outlives it: it was kept in an attribute"):
        kept[0].tolist()
    weight = torch.ones(2, device="jax").requires_grad_()
    with pytest.raises(ValueError, match=r"calls backward\(\), whose gradient .* \(2,\) would be"):
        scan(lambda c, x: (c, (x * weight).sum().backward()), zero, x)
    with pytest.raises(ValueError, match=r"takes the gradient of a tensor of shape \(2,\) from o"):
        scan(
            lambda c, x: (c + (c * weight).sum(), torch.autograd.grad(c * weight.sum(), weight)),
            zero,
            x,
        )
    own = xs.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"draws from a torch.Generator of its own"):
        scan(lambda c, x: (c, torch.rand(2, generator=own, device="jax")), zero, x)


def test_what_cannot_be_differentiated_is_refused():
    x = leaf(data(3, 2).float(), "jax")
    _, ys = scan(lambda c, x: (c, x.square()), torch.zeros((), device="jax"), x)
    with pytest.raises(RuntimeError, match="scan has no gradients of gradients"):
        torch.autograd.grad(ys.sum(), x, create_graph=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    with pytest.raises(ValueError, match="hands a tensor from outside to a torch"):
        scan(lambda c, one: (c, one + Twice.apply(x).sum()), torch.zeros((), device="jax"), x)
    with pytest.raises(
        ValueError, match=r"writes in place to a tensor .* that requires a gradient"
    ):

        def fn(carry, one):
            with torch.no_grad():
                x.mul_(2)
            return carry, one * x.sum()

        scan(fn, torch.zeros((), device="jax"), x)
    torch.testing.assert_close(x.detach().cpu(), data(3, 2).float())
