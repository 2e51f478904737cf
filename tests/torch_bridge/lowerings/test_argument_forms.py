"""A truth value as a number is 0 or 1, and 0 times infinity is NaN.

XLA takes a converted bool times x for a choice between x and 0, where x may be infinite.
"""

import math

import torch
from torch.nn import functional as F

from tests.torch_bridge.older_torch import AMINMAX
from tests.torch_bridge.on_both import on_both

X = torch.tensor([math.inf, 1.0, math.nan, 2.0])
TRUTHS = torch.tensor([False, False, False, True])


def _column(truths):
    return truths[:, None].float()


def _copied(tensors, sources):
    torch._foreach_copy_(tensors, sources)
    return tensors


_NUMBERS = {
    "to": lambda truths: truths.float(),
    "copy": lambda truths: truths.new_empty(4, dtype=torch.float32).copy_(truths),
    "bernoulli": lambda truths: torch.bernoulli(truths.float()),
    "bernoulli_p": lambda truths: torch.empty(4, device=truths.device).bernoulli_(0.0),
    "heaviside": lambda truths: torch.heaviside(
        truths.float() - 0.5, torch.zeros((), device=truths.device)
    ),
    "cdist": lambda truths: torch.cdist(_column(truths), _column(truths[:1]), p=0.0)[:, 0],
    "norm": lambda truths: torch.linalg.vector_norm(_column(truths), 0, 1),
    "eye": lambda truths: torch.eye(4, device=truths.device),
    "one_hot": lambda truths: F.one_hot(truths.long(), 4).float(),
    "foreach_copy": lambda truths: _copied([truths.new_zeros(4, dtype=X.dtype)], [truths])[0],
    "where": lambda truths: torch.where(truths, 1.0, 0.0),
    "where_of_integers": lambda truths: torch.where(truths, 1, 0),
    "count": lambda truths: truths[:, None].sum(1),
}


def test_zero_times_infinity():
    def program(truths, x):
        products = {name: numbers(truths) * x for name, numbers in _NUMBERS.items()}
        lists = torch._foreach_mul([x, x], [truths, x]), torch._foreach_mul([truths], math.inf)
        return products, lists

    on_both(program, TRUTHS, X, grad=False)


_HALVES = torch.tensor([[-3.0, 1, -0.5, 1], [2, 2, -1, -1.5], [0.5, 0, 0.5, -0.5]])
_REDUCTIONS = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, 1),
    "norm_0": lambda x: torch.linalg.vector_norm(x, 0, 1),
    "clamp": lambda x: x.clamp(0.2, 1.0),
    "relu": torch.relu,
    "abs": torch.abs,
}
_FUNCTIONS = (torch.acos, torch.reciprocal)


def _slopes(reductions):
    def program(x):
        return {
            (function.__name__, name): torch.autograd.grad(
                reduction(function(x)).sum(), x, allow_unused=True
            )
            for function in _FUNCTIONS
            for name, reduction in reductions.items()
        }

    on_both(program, _HALVES)


def test_gradients_where_the_inner_slope_is_infinite_or_nan():
    _slopes(_REDUCTIONS)


@AMINMAX
def test_gradients_of_aminmax_where_the_inner_slope_is_infinite_or_nan():
    _slopes({"aminmax": lambda x: torch.cat(torch.aminmax(x, dim=0))})
