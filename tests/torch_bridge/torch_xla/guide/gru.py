"""A GRU whose steps are one loop, against torch's own: values and gradients."""

import torch
import torch_xla
from torch_xla.experimental.gru import GRU

LENGTH, COUNT, FEATURES, WIDTH, LAYERS = 12, 3, 5, 8, 2


def run(module, device):
    draw = torch.Generator().manual_seed(1)
    steps = torch.randn(LENGTH, COUNT, FEATURES, generator=draw).to(device).requires_grad_()
    first = torch.randn(LAYERS, COUNT, WIDTH, generator=draw).to(device).requires_grad_()
    outputs, last = module(steps, first)
    (outputs.square().sum() + last.sum()).backward()
    if device != "cpu":
        torch_xla.sync()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    found = {"outputs": outputs, "last": last, "steps": steps.grad, "first": first.grad}
    return {name: t.detach().cpu() for name, t in (found | gradients).items()}


for bias in (True, False):
    torch.manual_seed(0)
    theirs = torch.nn.GRU(FEATURES, WIDTH, num_layers=LAYERS, bias=bias)
    ours = GRU(FEATURES, WIDTH, num_layers=LAYERS, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    want, got = run(theirs, "cpu"), run(ours.to("xla"), "xla")
    assert len(want) == 4 + LAYERS * (4 if bias else 2)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(ours.weight_hh[1].cpu(), theirs.weight_hh_l1)
    assert len(ours.bias_ih) == (LAYERS if bias else 0)

one = torch.randn(LENGTH, FEATURES)  # without a batch, and with the batch first
torch.testing.assert_close(ours(one.to("xla"))[0].cpu(), theirs(one)[0], rtol=1e-4, atol=1e-5)
first = GRU(FEATURES, WIDTH, LAYERS, False, batch_first=True)
first.load_state_dict(theirs.state_dict())
several = torch.randn(LENGTH, COUNT, FEATURES)
got = first.to("xla")(several.transpose(0, 1).to("xla"))[0].transpose(0, 1)
torch.testing.assert_close(got.cpu(), theirs(several)[0], rtol=1e-4, atol=1e-5)
