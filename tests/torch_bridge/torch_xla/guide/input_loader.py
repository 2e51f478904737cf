"""A loader that brings batches to the devices, already sharded, in the background."""

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
input_mesh = xs.Mesh(np.arange(num_devices), (num_devices, 1, 1, 1), ("B", "C", "W", "H"))
images = torch.randn(64, 3, 4, 4)
train_loader = torch.utils.data.DataLoader(images, batch_size=16)
device = xm.xla_device()

train_loader = pl.MpDeviceLoader(
    train_loader, device, input_sharding=xs.ShardingSpec(input_mesh, (0, 1, 2, 3))
)
assert len(train_loader) == 4
seen = []
for batch in train_loader:
    assert batch.device == device
    assert batch.sharding_spec == "{devices=[8,1,1,1]0,1,2,3,4,5,6,7}"
    assert [shard.data.shape for shard in batch.local_shards] == [(2, 3, 4, 4)] * 8
    seen.append(batch.cpu())
assert torch.equal(torch.cat(seen), images)

pairs = torch.utils.data.DataLoader(
    [{"x": image, "y": torch.tensor(number)} for number, image in enumerate(images)], batch_size=16
)
by_name = {
    "x": xs.ShardingSpec(input_mesh, (0, None, None, None)),
    "y": xs.ShardingSpec(input_mesh, (0,)),
}
labels = [batch["y"].cpu() for batch in pl.MpDeviceLoader(pairs, device, input_sharding=by_name)]
assert torch.equal(torch.cat(labels), torch.arange(64))
