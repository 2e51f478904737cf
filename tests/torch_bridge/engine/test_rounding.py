"""Each operation's result is rounded to its dtype, in one program as in many."""

import pytest
import torch

import isoshard.torch_bridge as xs

HALVES = [torch.bfloat16, torch.float16]


def draw(*size, dtype, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


UNARY = [
    *("abs", "neg", "square", "sqrt", "rsqrt", "exp", "expm1", "log1p", "sin", "cos", "tanh"),
    *("sigmoid", "erf", "reciprocal", "floor", "round", "trunc", "frac", "sign", "relu"),
]
AFTER = {
    "times": lambda x: x * 2.5,
    "float": lambda x: x.float(),
    "plus itself": lambda x: x + x / 3,
    "softmax": lambda x: x.softmax(-1),
    "gelu": torch.nn.functional.gelu,
    "sum": lambda x: x.sum(-1),
    "product": lambda x: x @ x.mT,
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}
BEFORE = {
    "product": lambda x: x @ x.mT,
    "batches": lambda x: torch.bmm(x[None], x.mT[None])[0],
    "addmm": lambda x: torch.addmm(x[:, :8], x, x.mT[:, :8], beta=0.5, alpha=1.5),
    "linear": lambda x: torch.nn.functional.linear(x, x[:8], x[0, :8]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv1d": lambda x: (
        torch.nn.functional.conv1d(x[None], x[:4, :, None].mT.mT[:, :8], x[0, :4])
        if x.shape[0] == 8
        else x
    ),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "mean": lambda x: x.mean(0, keepdim=True) + x,
    **{name: lambda x, name=name: getattr(x.abs(), name)() for name in UNARY},
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_one_program_is_as_one_by_one(before, after, dtype):
    x = draw(8, 16, dtype=dtype).to("jax")
    together = AFTER[after](BEFORE[before](x)).cpu()
    between = BEFORE[before](x)
    xs.sync()
    torch.testing.assert_close(
        together, AFTER[after](between).cpu(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_a_bias_is_added_before_the_rounding(dtype):
    x, b = draw(32, 32, dtype=dtype), draw(32, dtype=dtype, seed=1)
    exact = torch.nn.functional.linear(x.double(), x.double(), b.double()).to(dtype)
    found = torch.nn.functional.linear(*(t.to("jax") for t in (x, x, b))).cpu()
    assert (found != exact).sum() <= 2
    exact = torch.addmm(b.double(), x.double(), x.double(), beta=0.5, alpha=1.5).to(dtype)
    found = torch.addmm(*(t.to("jax") for t in (b, x, x)), beta=0.5, alpha=1.5).cpu()
    assert (found != exact).sum() <= 2


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_scattered_is_summed_before_the_rounding(dtype):
    x, index = draw(32, 48, dtype=dtype), torch.arange(32 * 48).reshape(32, 48) % 4
    for reduce in ("sum", "mean", "prod"):
        exact = x.double().scatter_reduce(0, index, x.double(), reduce).to(dtype)
        found = x.to("jax").scatter_reduce(0, index.to("jax"), x.to("jax"), reduce).cpu()
        assert (found != exact).sum() <= 2
    found = x.to("jax").scatter_add(0, index.to("jax"), x.to("jax")).cpu()
    assert (found != x.double().scatter_add(0, index, x.double()).to(dtype)).sum() <= 2


def test_layers_of_rows_that_were_merged_add_their_bias_before_the_rounding():
    x, w, b = (draw(*size, dtype=torch.bfloat16) for size in ((2, 5, 48), (40, 48), (40,)))
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double()).bfloat16()
    found = torch.nn.functional.linear(*(t.to("jax") for t in (x, w, b))).cpu()
    assert (found != exact).sum() <= 1


def test_a_product_is_representable():
    x = (draw(32, 32, dtype=torch.float32) / 5).bfloat16().to("jax")
    product = (x @ x).float().cpu()
    assert torch.equal(product.bfloat16().float(), product)


@pytest.mark.parametrize("compiled", [False, True])
def test_muon_is_as_on_the_cpu(compiled):
    weights = []
    for device in ("cpu", "jax"):
        weight = torch.nn.Parameter(draw(16, 8, dtype=torch.float32).to(device))
        x = draw(4, 16, dtype=torch.float32, seed=1).to(device)
        optimizer = torch.optim.Muon([weight], lr=1e-2)

        def step(x, weight=weight, optimizer=optimizer):
            (x @ weight).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = xs.compile(step) if compiled and device == "jax" else step
        for _ in range(5):
            step(x)
        weights.append(weight.detach().cpu())
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)


def test_freedom_by_name_is_another_program():
    def run(x):
        return ((x @ x).float() * 3).cpu()

    x = (draw(32, 32, dtype=torch.float32) / 5).bfloat16().to("jax")
    rounded = run(x)
    with xs.excess_precision():
        free = run(x)
        with xs.excess_precision(False):
            assert torch.equal(run(x), rounded)
    assert torch.equal(run(x), rounded)
    torch.testing.assert_close(free, rounded, rtol=2e-2, atol=2e-2)  # of bfloat16's 8 bits


@pytest.mark.parametrize("size", [(8, 9), (64, 65), (5, 1001)])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_what_is_reduced_was_rounded(size, dim):
    """XLA's library for reductions on CPUs leaves such roundings out, and makes NaN of some."""
    x = draw(*size, dtype=torch.float32).bfloat16()
    for before in (
        lambda x: (x * 0.01).exp(),
        lambda x: x * x,
        lambda x: (x.float() / 3).bfloat16(),
    ):
        there = x.to("jax")
        together = before(there).float().sum(dim)
        apart = before(there)
        xs.sync()
        apart = apart.float().sum(dim).cpu()
        torch.testing.assert_close(together.cpu(), apart, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(apart, before(x).float().sum(dim), rtol=1e-5, atol=1e-4)
