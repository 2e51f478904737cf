"""A decoder under FSDPv2: each layer wrapped by itself, with flash attention."""

import functools
import itertools

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from _models import Block, Decoder, on_cpu, started, token_loss, tokens
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.custom_kernel import flash_attention
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)

xr.use_spmd()
STEPS = 2
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (chips, 1), ("fsdp", "model"))
xs.set_global_mesh(mesh)
batch = tokens(2 * chips)
adam = functools.partial(torch.optim.Adam, lr=0.01)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def flash(query, key, value):
    scaled = query / query.shape[-1] ** 0.5
    split = ("fsdp", None, None, None)
    return flash_attention(scaled, key, value, causal=False, partition_spec=split)


def train():
    device = xm.xla_device()
    loader = pl.MpDeviceLoader(
        xu.SampleGenerator(data=batch, sample_count=50),
        device,
        input_sharding=xs.ShardingSpec(mesh, ("fsdp", None)),
    )
    model = FSDPv2(started(Decoder, device), auto_wrap_policy=policy)
    for layer in model.layers:
        layer.attention.attend = flash
    optimizer, losses = adam(model.parameters()), []
    for ids, wanted in itertools.islice(loader, STEPS):
        assert ids.local_shards[0].data.shape == (2, 16)
        optimizer.zero_grad()
        loss = token_loss(model, ids, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    torch_xla.sync()
    assert all(isinstance(layer, FSDPv2) for layer in model.layers)
    for name, parameter in model.named_parameters():
        whole, piece = parameter.numel(), parameter.local_shards[0].data.numel()
        assert piece == whole // chips, name
        assert optimizer.state[parameter]["exp_avg"].local_shards[0].data.numel() == piece
    return [loss.item() for loss in losses]


want = on_cpu(Decoder, token_loss, adam, batch, STEPS)
assert want[-1] < want[0]
assert np.allclose(train(), want, rtol=1e-4)
