"""`torch.compile` with the backend `openxla`: a move and a mark inside the graph."""

import torch
import torch_xla
import torch_xla.runtime as xr

xr.use_spmd()
chips = xr.global_runtime_device_count()
device = torch_xla.device()


def moved_inside(a, b):
    total = a.to(torch_xla.device()) + b.to(torch_xla.device())
    return total * torch.full((5,), 2.0, device=total.device) + torch.ones(5, device="xla")


a, b = torch.randn(2, 5)
total = torch.compile(moved_inside, backend="openxla")(a, b)
assert total.device == device and torch.allclose(total.cpu(), (a + b) * 2 + 1)


def marked(x):
    doubled = x * 2
    grid, names = [chips // 2, 2], "('data', 'model')"
    torch.ops.xla.dynamo_mark_sharding(doubled, list(range(chips)), grid, names, names)
    return doubled


doubled = torch.compile(marked, backend="openxla")(torch.ones(8, 8, device=device))
assert torch.equal(doubled.cpu(), torch.full((8, 8), 2.0))
assert [piece.data.shape for piece in doubled.local_shards] == [(2, 4)] * chips
