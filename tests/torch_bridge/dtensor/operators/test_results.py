"""What operators compute of distributed tensors, for every way these lie, with gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.torch_bridge.dtensor.operators.placed import (
    PLACEMENTS,
    S0,
    S1,
    S2,
    R,
    check,
    data,
)
from tests.torch_bridge.older_torch import AMINMAX

ONE = {
    "softmax over rows": lambda x: x.softmax(0),
    "softmax over columns": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "logsumexp": lambda x: x.logsumexp(0),
    "sum and mean": lambda x: (x.sum(), x.sum(0), x.mean(1), x.mean((0, 2), keepdim=True)),
    "var and std": lambda x: (x.var(0), x.std(), x.var(1, correction=0)),
    "norms": lambda x: (x.norm(), x.norm(1, dim=0), torch.linalg.vector_norm(x, 3.0, dim=1)),
    "extremes": lambda x: (x.amax(0), x.amin(1), x.max(), x.max(1).values),
    "both extremes": lambda x: (x.aminmax().min, x.aminmax(dim=0).max),
    "places of extremes": lambda x: (x.argmax(0), x.argmin(1), x.argmax()),
    "cumulative": lambda x: (x.cumsum(0), x.cumsum(1), x.sigmoid().cumprod(0), x.cummax(0).values),
    "sort": lambda x: (x.sort(0).values, x.argsort(1)),
    "topk": lambda x: (x.topk(3, 0).values, x.topk(2, 1).indices),
    "median": lambda x: (x.median(0).values, x.kthvalue(3, 1).values),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x: F.group_norm(x, 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "activations": lambda x: (F.gelu(x), F.silu(x), F.glu(x, 0), F.hardtanh(x), F.elu(x)),
    "where": lambda x: (torch.where(x > 0, x, 2.0), x.masked_fill(x < 0, 3.0), (x > 0).sum(0)),
    "merged axes": lambda x: (x.reshape(-1), x.flatten(1), x.reshape(x.shape[0], -1) * 2),
    "split axis": lambda x: (x.unflatten(0, (4, -1)).sum(1), x.view(2, -1, *x.shape[1:]).mean(0)),
    "moved axes": lambda x: (x.transpose(0, 1) + 1, x.permute(2, 0, 1), x.movedim(0, -1) * 2),
    "added axes": lambda x: (x[None] + x[:, None], x.unsqueeze(1).expand(-1, 3, -1, -1).sum(2)),
    "parts": lambda x: (x[4:9], x[:, ::3], x[3], x[..., -1], *x.chunk(4, 1), *x.split(5, 0)),
    "unbind": lambda x: [one * 2 for one in x[:, :2].unbind(1)],
    "together": lambda x: (torch.cat([x, x * 2], 0), torch.stack([x, x + 1], 1), x.repeat(2, 1, 1)),
    "turned": lambda x: (
        x.flip(0),
        x.roll(3, 0),
        x.rot90(1, (0, 1)),
        x.tril(),
        x.diagonal(0, 0, 1),
    ),
    "padded": lambda x: (F.pad(x, (1, 2, 3, 0)), F.pad(x, (1, 1), "circular")),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "pooled": lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 3, 1), F.adaptive_avg_pool1d(x, 3)),
    "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(-1, 1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x[..., :2].contiguous()) * 2j),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=AMINMAX) if n == "both extremes" else n for n in ONE]
)
def test_of_one_tensor(name):
    def function(x):
        return ONE[name](x)

    x = data(16, 8, 4).requires_grad_()
    check(function, [x], [(shape, [placements]) for shape, placements in PLACEMENTS])


rows = torch.arange(16) * 3 % 8
words = (torch.arange(64) * 7 % 32).reshape(16, 4)

SEVERAL = {
    "mm": (torch.mm, [(16, 8), (8, 24)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5), [(24,), (16, 8), (8, 24)]),
    "linear": (F.linear, [(16, 8), (24, 8), (24,)]),
    "bmm": (torch.bmm, [(16, 8, 4), (16, 4, 8)]),
    "baddbmm": (torch.baddbmm, [(16, 8, 8), (16, 8, 4), (16, 4, 8)]),
    "matmul of a stack": (torch.matmul, [(16, 8, 4), (4, 16)]),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->ijb", a, b), [(16, 8, 4), (16, 8, 4)]),
    "outer": (lambda a, b: (torch.outer(a, b), a[:8] @ b), [(16,), (8,)]),
    "sums": (lambda a, b: (a + b, a * b[0], a / (b.abs() + 1), a**2 - b), [(16, 8), (16, 8)]),
    "broadcast": (lambda a, b: (a + b, torch.maximum(a, b)), [(16, 8, 8), (8, 1)]),
    "lerp": (torch.lerp, [(16, 8), (16, 8), (16, 8)]),
    "losses": (lambda a, b: (F.mse_loss(a, b), F.smooth_l1_loss(a, b)), [(16, 8), (16, 8)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(16, 8, 8, 4)] * 3,
    ),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(16, 8, 16), (8, 8, 3), (8,)]),
    "conv2d of groups": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=8),
        [(16, 8, 8, 8), (8, 1, 3, 3)],
    ),
    "affine layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(16, 8), (8,), (8,)]),
    "svd": (lambda x: torch.linalg.svdvals(x), [(16, 8)]),
    "eigh": (lambda x: torch.linalg.eigvalsh(x @ x.T), [(8, 8)]),
    "cross entropy": (F.cross_entropy, [(16, 8), rows]),
    "nll of weights": (
        lambda x, at, w: F.nll_loss(x.log_softmax(1), at, w.abs() + 1),
        [(16, 8), rows, data(8)],
    ),
    "embedding": (lambda at, w: F.embedding(at, w, padding_idx=3), [words, (32, 8)]),
    "embedding_bag": (lambda at, w: F.embedding_bag(at, w, mode="mean"), [words, (32, 8)]),
    "gather": (
        lambda x, at: (x.gather(0, at % 16), x.take_along_dim(at % 8, 1)),
        [(16, 8), words],
    ),
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
    "indexed writes": (
        lambda x, at, y: torch.index_put(x, (at, at), y, accumulate=True),
        [(16, 8), rows, (16,)],
    ),
}
MANY = [
    ((4,), [[S0], [S1], [S2], [R]]),
    ((2, 4), [[S0, S1], [S1, S0], [R, S0], [S0, S0]]),
]


def numbers_or_data(given, seed):
    return given if torch.is_tensor(given) else data(*given, seed=seed).requires_grad_()


@pytest.mark.parametrize("name", SEVERAL)
def test_of_several_tensors(name):
    function, operands = SEVERAL[name]
    wholes = [numbers_or_data(one, seed) for seed, one in enumerate(operands)]
    layouts = []
    for shape, choices in MANY:
        all_layouts = list(itertools.product(choices, repeat=len(operands)))
        layouts += [(shape, own) for own in all_layouts[:: max(1, len(all_layouts) // 4)]]
    check(function, wholes, layouts)
