"""A decoder that predicts the next token: weights over both axes, activations marked, AdamW."""

import numpy as np
import report
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

STEPS, BATCH, LENGTH, WIDTH, HEADS, LAYERS, TOKENS = 10, 8, 32, 64, 4, 2, 128


class Layer(nn.Module):
    """Attention and a perceptron, each around a normalisation."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q, k, v = (
            t.reshape(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embeddings, layers, and the embedding once more as the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        report.mark("embedded", x, xs.get_global_mesh(), ("fsdp", None, "tensor"))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            report.mark(f"activation {number}", x, xs.get_global_mesh(), (0, None, None))
        return F.linear(self.norm(x), self.embed.weight)


xr.use_spmd()
devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices // 2, 2), ("fsdp", "tensor"))
xs.set_global_mesh(mesh)
device = torch_xla.device()

torch.manual_seed(0)
model = Decoder()
starts, strides = torch.randint(TOKENS, (2, STEPS * BATCH, 1))
tokens = (starts + torch.arange(LENGTH + 1) * (strides % 4)) % TOKENS

model = model.to(device)
SPECS = {
    "embed.weight": ("fsdp", "tensor"),
    "position": (None, 1),
    "qkv.weight": ("tensor", "fsdp"),
    "out.weight": ("fsdp", "tensor"),
    "up.weight": (("tensor", "fsdp"), None),
    "up.bias": (("tensor",),),
    "down.weight": (None, (1, 0)),
    "norm.weight": (None,),
}
for name, parameter in model.named_parameters():
    for ending, spec in SPECS.items():
        if name.endswith(ending):
            report.mark(name, parameter, mesh, spec)
            break

data = [{"tokens": t, "mean": t.float().mean(1)} for t in tokens.split(BATCH)]
sharding = {
    "tokens": xs.ShardingSpec(mesh, ("fsdp", None)),
    "mean": xs.ShardingSpec(mesh, (("tensor", "fsdp"),)),
}
loader = pl.MpDeviceLoader(data, device, input_sharding=sharding)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for batch in loader:
    for name, tensor in batch.items():
        report.note(name, tensor)
    with torch_xla.step():
        optimizer.zero_grad()
        logits = model(batch["tokens"][:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, TOKENS), batch["tokens"][:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    losses.append(loss.detach())
report.finish(losses, model.named_parameters())
