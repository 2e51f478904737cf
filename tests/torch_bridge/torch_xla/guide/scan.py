"""`scan`: a running sum that is written in place, and a running mean of a nested carry."""

import torch
import torch_xla
from torch_xla.experimental.scan import scan

device = torch_xla.device()


def add(total, number):
    total += number
    return total, total


start = torch.zeros(1, device=device)
numbers = torch.tensor([3.0, 1.0, 4.0, 1.0], device=device)
last, history = scan(add, start, numbers)
torch_xla.sync()
assert last.tolist() == [9.0] and history.tolist() == [[3.0], [4.0], [8.0], [9.0]]
assert start.tolist() == [0.0]


def mean(seen, given):
    seen = {"total": seen["total"] + given["number"], "count": seen["count"] + 1}
    return seen, seen["total"] / seen["count"]


nothing = {name: torch.zeros(1, device=device) for name in ("total", "count")}
numbers = torch.tensor([2.0, 4.0, 9.0], device=device, requires_grad=True)
seen, means = scan(mean, nothing, {"number": numbers})
assert {name: t.tolist() for name, t in seen.items()} == {"total": [15.0], "count": [3.0]}
assert means.tolist() == [[2.0], [3.0], [5.0]]
means.sum().backward()
assert torch.allclose(numbers.grad.cpu(), torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]))
