"""A batch split over one mesh axis, space in uneven blocks over another, in torch.

A device sends what it would for its own samples on a mesh of space alone: rows.
"""

import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.domain.traffic import gathered, sent, summed

SIZES = {2: (5, 2, 7, 4)}
SPEC = P("data", None, "x")


class UNet(torch.nn.Module):
    """Down, along and up again."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(4)
        self.down = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.last = torch.nn.Conv2d(8, 4, 3, padding=1, padding_mode="replicate")

    def forward(self, x):
        half = F.relu(self.down(self.norm(x)))
        up = torch.cat([self.up(half), x], 1)
        return self.last(up)


def step(model, x):
    y = model(x)
    loss = (y.square() * torch.linspace(-1, 1, 8, device=y.device)).mean()
    return loss, y, torch.autograd.grad(loss, [x, *model.parameters()])


def trained(mesh):
    """What a compiled step gives, and its program; the same in float64 on the CPU."""
    model = UNet()
    x = torch.randn(2, 4, 18, 8)
    plain = UNet().double()
    plain.load_state_dict(model.state_dict())
    want = step(plain, x.double().requires_grad_())
    field = iso.shard(x, mesh, SPEC, uneven="pad", sizes=SIZES).requires_grad_()
    compiled = xs.compile(step)
    model = model.to("jax")
    found = compiled(model, field)
    return found, want, xs.program_text(compiled)


def test_a_unet_sends_what_one_sample_does():
    found, want, text = trained(iso.make_mesh((2, 4), ("data", "x")))
    assert found[1].named_sharding.spec == found[2][0].named_sharding.spec == SPEC
    assert found[1].block_sizes[2] and found[2][0].block_sizes[2]
    for one, other in zip((*found[:2], *found[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(one.detach().cpu().double(), other, rtol=1e-3, atol=1e-4)
    assert gathered(text) == 0
    assert summed(text) <= max(weight.numel() for weight in UNet().parameters())
    row = 4 * 8  # of one sample, of which a device has no more
    gradient = row  # which `torch.autograd.grad` lays out in the blocks of its leaf
    assert found[2][0].block_sizes[2] == SIZES[2]
    assert 0 < sent(text) <= 20 * row + gradient
