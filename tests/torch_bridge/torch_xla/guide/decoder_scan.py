"""The layers of a decoder as one loop of the program."""

import functools

import numpy as np
import torch
import torch_xla
from _models import Decoder, losses_of, on_cpu, started, token_loss, tokens
from torch_xla.experimental.scan_layers import scan_layers

STEPS = 4


class Looped(Decoder):
    def through_layers(self, x):
        return scan_layers(self.layers, x)


def make(kind=Looped):
    return kind(depth=4)


batch = tokens(4)
adam = functools.partial(torch.optim.Adam, lr=0.01)
model = started(make, torch_xla.device())
optimizer = adam(model.parameters())
here = [t.to("xla") for t in batch]
losses = losses_of(model, optimizer, token_loss, here, STEPS, torch_xla.sync)

plain = functools.partial(make, Decoder)
assert np.allclose(losses, on_cpu(plain, token_loss, adam, batch, STEPS), rtol=1e-4)
text = torch_xla._XLAC._get_xla_tensors_hlo([model(here[0])])
assert " while(" in text  # four layers are one loop
assert " while(" not in torch_xla._XLAC._get_xla_tensors_hlo([started(plain, "xla")(here[0])])
