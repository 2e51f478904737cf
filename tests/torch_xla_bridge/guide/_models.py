"""The models of the example programs, made small, and what they learn on the CPU.

`run-torch-xla guide/fsdp.py` puts this folder on the path, so `from _models import Decoder`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH = 64, 16


def softmax_attention(query, key, value):
    """Attention of every token to every other, written out."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value


class Attention(nn.Module):
    """Four heads."""

    def __init__(self):
        super().__init__()
        self.inward, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = softmax_attention

    def forward(self, x):
        query, key, value = self.inward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """Up, gate and down."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 32, bias=False) for _ in "ab")
        self.down = nn.Linear(32, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), GatedMLP()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Tokens in, scores of every word out."""

    def __init__(self, depth=1):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def through_layers(self, x):
        """What a subclass may do another way."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.scores(self.through_layers(self.embedding(ids)))


def token_loss(model, ids, wanted):
    """Cross entropy over all tokens."""
    return functional.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())


def tokens(count, length=16):
    """Sequences, and the tokens that are wanted for them."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, WORDS, (count, length), generator=generator) for _ in "ab")


class Residual(nn.Module):
    """A convolution and a way around it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return functional.relu(self.norm(self.first(x)) + x, inplace=True)


def resnet(classes=10):
    """A ResNet of one block."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Residual(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def images(count, size=8):
    """Pictures and their classes."""
    generator = torch.Generator().manual_seed(8)
    pictures = torch.randn(count, 3, size, size, generator=generator)
    return pictures, torch.randint(0, 10, (count,), generator=generator)


def image_loss(model, pictures, classes):
    """Cross entropy of the classes."""
    return functional.cross_entropy(model(pictures), classes)


def started(make, device="cpu"):
    """A model on a device, with the same numbers whatever the device."""
    torch.manual_seed(0)
    return make().to(device)


def losses_of(model, optimizer, loss_of, batch, steps, end_step=None):
    """The losses of a training loop, of one batch again and again."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        if end_step is not None:
            end_step()
        losses.append(loss.item())
    return losses


def on_cpu(make, loss_of, optimizer_of, batch, steps):
    """The losses of torch's own training, on the CPU."""
    model = started(make)
    return losses_of(model, optimizer_of(model.parameters()), loss_of, batch, steps)
