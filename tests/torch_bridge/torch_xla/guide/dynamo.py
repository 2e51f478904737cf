"""`torch.compile` with the backend `openxla`: inference, a mark inside the graph."""

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

layer = torch.nn.Linear(4, 4)
there = torch.nn.Linear(4, 4).to(device).eval()
there.load_state_dict(layer.state_dict())
compiled = torch.compile(there, backend="openxla")
x = torch.randn(2, 4)
with torch.no_grad():
    for _ in range(2):
        got = compiled(x.to(device))
torch.testing.assert_close(got.cpu(), layer(x).detach(), rtol=1e-4, atol=1e-5)


def marked(x):
    doubled = x * 2
    grid, names = [chips // 2, 2], "('data', 'model')"
    torch.ops.xla.dynamo_mark_sharding(doubled, list(range(chips)), grid, names, names)
    return doubled


doubled = torch.compile(marked, backend="openxla")(torch.ones(8, 8, device=device))
assert torch.equal(doubled.cpu(), torch.full((8, 8), 2.0))
assert [piece.data.shape for piece in doubled.local_shards] == [(2, 4)] * chips
