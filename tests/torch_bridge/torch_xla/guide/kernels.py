"""Pages about speed: pure functions, quantized products, accumulated gradients, loops."""

import numpy as np
import torch
import torch_xla
import torch_xla.experimental.custom_kernel
import torch_xla.experimental.fori_loop
from _models import image_loss, images, resnet, started
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call
from torch_xla.experimental.assume_pure import assume_pure
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear

device = torch_xla.device()
calls = []


@assume_pure
def product(a, b, shift):
    calls.append(shift)
    return a @ b + shift


for factor in (1.0, 2.0, 3.0):
    got = product(torch.full((2, 2), factor, device=device), torch.ones(2, 2, device=device), 4)
    assert torch.equal(got.cpu(), torch.full((2, 2), 2 * factor + 4))
assert calls == [4]  # traced once

linear = torch.nn.Linear(6, 3)
moved = torch.nn.Linear(6, 3).to(device)
moved.load_state_dict(linear.state_dict())
forward = assume_pure(lambda parameters, x: functional_call(moved, parameters, (x,)))
x = torch.randn(5, 6)
got = forward(dict(moved.named_parameters()), x.to(device))
torch.testing.assert_close(got.cpu(), linear(x).detach())

scale = linear.weight.detach().abs().amax(1) / 127
whole = (linear.weight.detach() / scale[:, None]).round().to(torch.int8)
want = torch.ops.xla.quantized_matmul(x, whole, scale)
arguments = [t.to(device) for t in (x, whole, scale)]
for function in (
    torch.ops.xla.quantized_matmul,
    torch.compile(lambda *given: torch.ops.xla.quantized_matmul(*given), backend="openxla"),
):
    torch.testing.assert_close(function(*arguments).cpu(), want)
swapped = XlaQuantizedLinear(6, 3)
swapped.load_quantized_weight(whole, scale)
torch.testing.assert_close(swapped.to(device)(arguments[0]).cpu(), want)
torch.testing.assert_close(want, x @ linear.weight.detach().t(), rtol=0.05, atol=0.05)

pictures, classes = images(8)
reference, model = started(resnet).eval(), started(resnet, device).eval()
for part in zip(pictures.chunk(4), classes.chunk(4), strict=True):
    (image_loss(reference, *part) / 4).backward()
parts = [t.unflatten(0, (4, 2)).to(device) for t in (pictures, classes)]
count = torch.tensor(0, device=device)


def one(pictures, classes, count):
    return image_loss(model, pictures, classes), count + 1


loss, count = gradient_accumulation(one, parts, model, count)
assert count.item() == 4
assert np.isclose(loss.item(), image_loss(reference, pictures, classes).item(), rtol=1e-4)
torch.testing.assert_close(
    model[0].weight.grad.cpu(), reference[0].weight.grad, rtol=1e-3, atol=1e-5
)

left, value = torch.tensor(10, device=device), torch.tensor(3, device=device)
_, value = while_loop(lambda left, _: left > 0, lambda left, x: (left - 1, x + 1), (left, value))
assert value.item() == 13
while left > 0:  # by Python: each condition is read from the device
    left -= 1
assert left.item() == 0

pages = torch.randn(2, 6, 4, 8).to(device)  # two heads of six pages of four tokens
lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
query = torch.randn(2, 4, 8).to(device)
got = torch.ops.xla.paged_attention(query, pages, pages, lengths, table, 1, megacore_mode=None)
held = pages[:, table[0]].flatten(1, 2)[:, :5].cpu()  # what the first sequence has
heads = query[0].cpu().unflatten(0, (2, 2))
want = (heads @ held.mT).softmax(-1) @ held
torch.testing.assert_close(got[0].cpu(), want.flatten(0, 1), rtol=1e-4, atol=1e-5)
