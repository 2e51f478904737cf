"""A decoder with flash attention on one chip, and with a mask that looks back only."""

import functools

import numpy as np
import torch
import torch_xla
from _models import Decoder, losses_of, on_cpu, started, token_loss, tokens
from torch.nn import functional
from torch_xla.experimental.custom_kernel import flash_attention

STEPS = 4
batch = tokens(4)
adam = functools.partial(torch.optim.Adam, lr=0.01)
here = [t.to(torch_xla.device()) for t in batch]


def with_attention(attend):
    model = Decoder()
    for layer in model.layers:
        layer.attention.attend = attend
    return model


def flash(query, key, value, causal=False):
    return flash_attention(query / query.shape[-1] ** 0.5, key, value, causal=causal)


torchs = functional.scaled_dot_product_attention
for causal in (False, True):
    model = started(functools.partial(with_attention, functools.partial(flash, causal=causal)))
    model = model.to(torch_xla.device())
    optimizer = adam(model.parameters())
    losses = losses_of(model, optimizer, token_loss, here, STEPS, torch_xla.sync)
    plain = functools.partial(with_attention, functools.partial(torchs, is_causal=causal))
    assert np.allclose(losses, on_cpu(plain, token_loss, adam, batch, STEPS), rtol=1e-4)
    assert losses[-1] < losses[0]
