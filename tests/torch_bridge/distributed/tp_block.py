"""A transformer block as LLaMA's, and its plans."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

HEADS, HEAD, LENGTH, BATCH = 8, 4, 8, 4
WIDTH, WIDE = HEADS * HEAD, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        q, k, v = (
            layer(x).view(x.shape[0], -1, HEADS, HEAD).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(x.shape[0], -1, WIDTH))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, WIDE)
        self.w2 = nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def plan(styles):
    """Megatron's tensor parallelism, by the styles of a module (ours or torch's)."""
    return {
        "attention": styles.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        "attention.w[qkv]": styles.ColwiseParallel(),
        "attention.wo": styles.RowwiseParallel(),
        "feed_forward.w1": styles.ColwiseParallel(),
        "feed_forward.w2": styles.RowwiseParallel(),
    }


def sequence_plan(styles):
    """The same with the activations between the layers split along the sequence."""
    enter = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "attention_norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(**enter),
        "attention.w[qkv]": styles.ColwiseParallel(),
        "attention.wo": styles.RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": styles.SequenceParallel(),
        "feed_forward": styles.PrepareModuleInput(**enter),
        "feed_forward.w1": styles.ColwiseParallel(),
        "feed_forward.w2": styles.RowwiseParallel(output_layouts=Shard(1)),
    }


def reference(block, x, weight):
    """Output, and gradients of the input and of every parameter, in float64 on the CPU."""
    x = x.double().requires_grad_()
    out = block.double()(x)
    (out * weight.double()).sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in block.named_parameters()}


def inputs(seed=0):
    """A block, an input and the weights of a loss."""
    torch.manual_seed(seed)
    shape = (BATCH, LENGTH, WIDTH)
    return Block(), torch.randn(shape), torch.randn(shape)
