"""Every parallel style with layouts of inputs and outputs: what the whole module computes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed.tensor import distribute_tensor, init_device_mesh
from isoshard.torch_bridge.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LAYOUTS = [  # of inputs and outputs
    (None, None),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(-1)),
    (Shard(-1), Replicate()),
]
MODULES = {
    "linear": lambda: nn.Linear(16, 8),
    "linear without bias": lambda: nn.Linear(16, 8, bias=False),
    "embedding": lambda: nn.Embedding(16, 8),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "RMSNorm": lambda: nn.RMSNorm(16),
}
CASES = [
    (ColwiseParallel, "linear", "mesh"),
    (ColwiseParallel, "embedding", "mesh"),
    (RowwiseParallel, "linear", "mesh"),
    (RowwiseParallel, "linear without bias", "part"),
    (SequenceParallel, "LayerNorm", "mesh"),
    (SequenceParallel, "RMSNorm", "part"),
]


def styles(style, part):
    """Each on one of two layouts."""
    first = int(part == "part")
    if style is SequenceParallel:
        return [(None, None, SequenceParallel(sequence_dim=first))]
    layouts = LAYOUTS[first::2]
    return [(have, want, style(input_layouts=have, output_layouts=want)) for have, want in layouts]


@pytest.mark.parametrize(("style", "name", "part"), CASES)
def test_a_style_changes_no_value(style, name, part):
    torch.manual_seed(0)
    whole = MODULES[name]().double()
    given = torch.arange(32).remainder(16).reshape(8, 4)
    x = given if name == "embedding" else torch.randn(8, 4, 16, dtype=torch.float64)
    mesh = init_device_mesh("jax", (4,))
    if part == "part":
        mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
    leaf = x.clone().requires_grad_(x.is_floating_point())
    want = whole(leaf)
    want.square().sum().backward()

    found = []
    for have, out_layout, one in styles(style, part):
        module = parallelize_module(copy.deepcopy(whole).to("jax"), mesh, one)
        mine = distribute_tensor(x, mesh, [have or Replicate()])
        mine = mine.requires_grad_(x.is_floating_point())
        out = module(mine)
        out.square().sum().backward()
        found.append((out, out_layout, mine, module))
    xs.sync()

    for out, out_layout, mine, module in found:
        torch.testing.assert_close(out.detach().cpu(), want.detach())
        if out_layout is not None:
            dim = Shard(out_layout.dim % 3) if out_layout.is_shard() else out_layout
            assert out.placements[-1] == dim
        if leaf.grad is not None:
            torch.testing.assert_close(mine.grad.cpu(), leaf.grad)
        for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
