"""Small tensors that the tests of lowerings share; each has what its dtype is awkward about."""

import torch

INF, NAN = float("inf"), float("nan")

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, INF, -INF, NAN])
FLOATS = torch.tensor([[0.3, -1.7, 2.0, 0.9], [-0.2, 4.1, -3.3, 1.0], [0.8, -0.6, 1.5, -2.4]])
ROW = torch.tensor([1.5, -2.0, 0.7, 3.0])
UNIT = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
POSITIVE = torch.tensor([[0.1, 0.7, 1.0], [2.3, 5.0, 11.0]])
INTS = torch.tensor([[3, -7, 0, 5], [-1, 8, 2, -4], [6, 1, -9, 2]])
DIVISORS = torch.tensor([2, -3, 4, -1])
BYTES = torch.tensor([0, 1, 7, 200, 255], dtype=torch.uint8)
BOOLS = torch.tensor([[True, False, True, True], [False, False, True, False], [True] * 4])
HALVES = FLOATS.bfloat16()
SCALAR = torch.tensor(2.5)
INT_SCALAR = torch.tensor(3)
EMPTY = torch.empty(0, 4)
COMPLEX = torch.complex(FLOATS, FLOATS.flip(0))
TIES = torch.tensor([[2.0, 1.0, 2.0, 1.0], [NAN, 5.0, NAN, 5.0], [-1.0, -1.0, -1.0, 0.0]])
CUBE = torch.arange(24.0).reshape(2, 3, 4).sub(11.5).mul(0.3)
