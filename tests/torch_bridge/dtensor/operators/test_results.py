"""What operators compute of distributed tensors, for several ways these lie, with gradients.

Single operators over a mesh, all of them, are in `tests/conformance` (sharded) and `tests/fuzz`.
"""

import itertools

import torch
import torch.nn.functional as F

from tests.torch_bridge.dtensor.operators.placed import S0, S1, R, check, data

rows = torch.arange(16) * 3 % 8
words = (torch.arange(64) * 7 % 32).reshape(16, 4)

SEVERAL = {
    "mm": (torch.mm, [(16, 8), (8, 24)]),
    "linear": (F.linear, [(16, 8), (24, 8), (24,)]),
    "bmm": (torch.bmm, [(16, 8, 4), (16, 4, 8)]),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->ijb", a, b), [(16, 8, 4), (16, 8, 4)]),
    "sums": (lambda a, b: (a + b, a * b[0], a / (b.abs() + 1), a**2 - b), [(16, 8), (16, 8)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(16, 8, 8, 4)] * 3,
    ),
    "conv2d of groups": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=8),
        [(16, 8, 8, 8), (8, 1, 3, 3)],
    ),
    "affine layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(16, 8), (8,), (8,)]),
    "eigh": (lambda x: torch.linalg.eigvalsh(x @ x.T), [(8, 8)]),
    "cross entropy": (F.cross_entropy, [(16, 8), rows]),
    "embedding": (lambda at, w: F.embedding(at, w, padding_idx=3), [words, (32, 8)]),
    "gather": (lambda x, at: (x.gather(0, at % 16), x.take_along_dim(at % 8, 1)), [(16, 8), words]),
    "scatter": (
        lambda x, at, y: (x.scatter(1, at % 4 + at[:1] * 0, y), x.scatter_add(0, at % 16, y)),
        [(16, 8), words, (16, 4)],
    ),
    "rows by number": (
        lambda x, at: (x[at], x.index_select(1, at[:4]), x[:, at], x[at, at[:, None]]),
        [(16, 8, 4), rows],
    ),
    "written rows": (
        lambda x, at: x.clone().index_add_(0, at, x).index_fill_(1, at[:2], 0),
        [(16, 8), rows],
    ),
}
PLACEMENTS = [[S0, S1], [S1, S0], [R, S0], [S0, S0]]


def numbers_or_data(given, seed):
    return given if torch.is_tensor(given) else data(*given, seed=seed).requires_grad_()


def test_of_several_tensors():
    cases = {}
    for number, (name, (function, operands)) in enumerate(SEVERAL.items()):
        wholes = [numbers_or_data(one, seed) for seed, one in enumerate(operands)]
        layouts = list(itertools.product(PLACEMENTS, repeat=len(operands)))
        cases[name] = function, wholes, [layouts[11 * number % len(layouts)]]
    check(cases, (2, 4))
