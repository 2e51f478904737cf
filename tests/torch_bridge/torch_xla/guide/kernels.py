"""Pages about speed: pure functions, quantized products, accumulated gradients, loops, a GRU."""

import torch
import torch_xla
import torch_xla.experimental.custom_kernel
import torch_xla.experimental.fori_loop
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call
from torch_xla.experimental.assume_pure import assume_pure
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.gru import GRU
from torch_xla.experimental.scan import scan
from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear

device = torch_xla.device()
calls = []


@assume_pure
def product(a, b, shift):
    calls.append(shift)
    return a @ b + shift


for factor in (1.0, 2.0):
    got = product(torch.full((2, 2), factor, device=device), torch.ones(2, 2, device=device), 4)
    assert torch.equal(got.cpu(), torch.full((2, 2), 2 * factor + 4))
assert calls == [4]  # traced once

linear = torch.nn.Linear(6, 3)
moved = torch.nn.Linear(6, 3).to(device)
moved.load_state_dict(linear.state_dict())
forward = assume_pure(lambda parameters, x: functional_call(moved, parameters, (x,)))
x = torch.randn(5, 6)
torch.testing.assert_close(
    forward(dict(moved.named_parameters()), x.to(device)).cpu(), linear(x).detach()
)

scale = linear.weight.detach().abs().amax(1) / 127
whole = (linear.weight.detach() / scale[:, None]).round().to(torch.int8)
want = torch.ops.xla.quantized_matmul(x, whole, scale)
arguments = [t.to(device) for t in (x, whole, scale)]
torch.testing.assert_close(torch.ops.xla.quantized_matmul(*arguments).cpu(), want)
swapped = XlaQuantizedLinear(6, 3)
swapped.load_quantized_weight(whole, scale)
torch.testing.assert_close(swapped.to(device)(arguments[0]).cpu(), want)
torch.testing.assert_close(want, x @ linear.weight.detach().t(), rtol=0.05, atol=0.05)

batches = torch.randn(4, 2, 6)
linear(batches).square().mean().backward()


def one(batch, count):
    return moved(batch).square().mean(), count + 1


loss, count = gradient_accumulation(
    one, (batches.to(device),), moved, torch.tensor(0, device=device)
)
assert count.item() == 4 and loss.item() > 0
torch.testing.assert_close(moved.weight.grad.cpu(), linear.weight.grad, rtol=1e-3, atol=1e-5)

left, value = torch.tensor(10, device=device), torch.tensor(3, device=device)
_, value = while_loop(lambda left, _: left > 0, lambda left, x: (left - 1, x + 1), (left, value))
assert value.item() == 13

pages = torch.randn(2, 6, 4, 8).to(device)  # two heads of six pages of four tokens
lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
query = torch.randn(2, 4, 8).to(device)
got = torch.ops.xla.paged_attention(query, pages, pages, lengths, table, 1, megacore_mode=None)
held = pages[:, table[0]].flatten(1, 2)[:, :5].cpu()  # what the first sequence has
heads = query[0].cpu().unflatten(0, (2, 2))
want = (heads @ held.mT).softmax(-1) @ held
torch.testing.assert_close(got[0].cpu(), want.flatten(0, 1), rtol=1e-4, atol=1e-5)


def add(total, number):
    total += number
    return total, total


start = torch.zeros(1, device=device)
last, history = scan(add, start, torch.tensor([3.0, 1.0, 4.0], device=device))
torch_xla.sync()
assert last.tolist() == [8.0] and history.tolist() == [[3.0], [4.0], [8.0]]
assert start.tolist() == [0.0]


def mean(seen, given):
    seen = {"total": seen["total"] + given["number"], "count": seen["count"] + 1}
    return seen, seen["total"] / seen["count"]


nothing = {name: torch.zeros(1, device=device) for name in ("total", "count")}
numbers = torch.tensor([2.0, 4.0, 9.0], device=device, requires_grad=True)
_, means = scan(mean, nothing, {"number": numbers})
assert means.tolist() == [[2.0], [3.0], [5.0]]
means.sum().backward()
assert torch.allclose(numbers.grad.cpu(), torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]))

theirs, ours = torch.nn.GRU(5, 4, num_layers=2), GRU(5, 4, num_layers=2)
ours.load_state_dict(theirs.state_dict())
steps, first = torch.randn(3, 2, 5), torch.randn(2, 2, 4)
want, got = theirs(steps, first), ours.to(device)(steps.to(device), first.to(device))
for one, other in zip(got, want, strict=True):
    torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
assert torch.equal(ours.weight_hh[1].cpu(), theirs.weight_hh_l1)
