"""`torch_xla.core.functions`."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge.torch_xla.core import functions


def test_collectives_of_one_replica_pass_gradients():
    x = torch.randn(4, 3, device="jax", requires_grad=True)
    (functions.all_reduce("sum", x, scale=2.0) * functions.all_gather(x, 1)).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 4 * x.detach().cpu())


@pytest.mark.parametrize("split", [1, 3])
def test_distributed_mm(split):
    w, x = torch.randn(5, 4), torch.randn(4, 6)
    got = functions.distributed_mm(w.to("jax"), x.to("jax"), split)
    torch.testing.assert_close(got.cpu(), w @ x)
    with pytest.raises(ValueError, match="x needs 4 rows, and columns that 4 divides"):
        functions.distributed_mm(w, x, 4)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 4, 5)])
def test_sync_batch_norm_is_the_batch_norm_of_the_whole_batch(shape):
    x = torch.randn(*shape, dtype=torch.float64) * 2 + 1
    ours = functions.SyncBatchNorm(3).to("jax")
    want = torch.nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(ours(x.float().to("jax")).cpu().double(), want, rtol=1e-4, atol=1e-5)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    mean, var = 0.1 * x.mean(axes), 0.9 + 0.1 * x.var(axes, correction=0)
    torch.testing.assert_close(ours.running_mean.cpu().double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.running_var.cpu().double(), var, rtol=1e-5, atol=1e-6)
    want = torch.nn.functional.batch_norm(x, mean, var)
    got = ours.eval()(x.float().to("jax"))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)
