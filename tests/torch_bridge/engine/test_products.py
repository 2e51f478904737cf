"""Products on axes as they were before torch merged and transposed them."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives

REARRANGED = {
    "as it is": lambda x: x,
    "turned": lambda x: x.transpose(-1, -2),
    "axes in another order": lambda x: x.permute(*range(1, x.dim()), 0),
    "rows merged": lambda x: x.flatten(0, -2),
    "rows merged and turned": lambda x: x.flatten(0, -2).t(),
    "batch merged": lambda x: x.reshape(-1, *x.shape[-2:]),
    "axes split off and merged": lambda x: x.permute(1, 0, *range(2, x.dim())).flatten(0, 1),
    "a copy of another shape": lambda x: x.transpose(0, 1).contiguous().view(-1, x.shape[-1]),
}
EXTENTS = [(1, 3, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2)]


@pytest.mark.parametrize("size", EXTENTS, ids=str)
def test_sums_over_axes_that_look_like_merged_rows(size):
    numbers = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
    wanted, got = {}, {}
    for name, rearranged in REARRANGED.items():
        x, y = rearranged(numbers), rearranged(numbers.to("jax"))
        for count in range(1, x.dim() + 1):
            for n, axes in enumerate(itertools.combinations(range(x.dim()), count)):
                key = (name, axes, n % 2 == 0)
                wanted[key], got[key] = x.sum(*key[1:]), y.sum(*key[1:])
    xs.sync()
    for key, want in wanted.items():
        assert torch.equal(got[key].cpu(), want), key


@pytest.mark.parametrize("size", EXTENTS[:3], ids=str)
def test_products_of_what_looks_like_merged_rows(size):
    numbers = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
    wanted, got = {}, {}
    pairs = list(itertools.product(REARRANGED.items(), repeat=2))
    pairs = [pairs[n] for n in range(len(pairs)) if (n // 8 + n + EXTENTS.index(size)) % 2]
    for (first, one), (second, two) in pairs:  # every second pair, others with each size
        a, b = one(numbers), two(numbers)
        c, d = one(numbers.to("jax")), two(numbers.to("jax"))
        for turned in (False, True):
            left, right = a.shape, (b.mT if turned else b).shape
            if left[-1] == right[-2] and left[:-2] == right[:-2]:
                key = (first, second, turned)
                want = wanted[key] = a @ (b.mT if turned else b)
                have = got[key] = c @ (d.mT if turned else d)
                wanted[*key, "rows"] = want.flatten(0, -2).sum(0, keepdim=True)
                got[*key, "rows"] = have.flatten(0, -2).sum(0, keepdim=True)
    xs.sync()
    for key, want in wanted.items():
        assert torch.equal(got[key].cpu(), want), key


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "tp"))


def gradients(layer, x, mesh):
    """The compiled step's gradients, and the collectives it sends."""
    layer = iso.shard(layer, mesh, {"weight": None, "bias": None})

    @xs.compile
    def step(x):
        layer.zero_grad()
        xs.mark_sharding(y := layer(x), mesh, ("data", "tp", None))
        F.gelu(y).square().sum().backward()
        return y.detach()

    y = step(iso.shard(x, mesh, P("data", "tp")))
    return y.cpu(), layer.weight.grad.cpu(), layer.bias.grad.cpu(), xs.program_text(step)


def test_a_layer_over_batch_and_sequence_gathers_nothing(mesh):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(12, 20), torch.randn(4, 8, 12)
    double = torch.nn.Linear(12, 20).double()
    double.load_state_dict(layer.state_dict())
    expected = double(x.double())
    F.gelu(expected).square().sum().backward()
    y, weight, bias, text = gradients(layer, x, mesh)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.double(), double.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.double(), double.bias.grad, rtol=1e-5, atol=1e-5)
    sent = collectives(text)
    assert {found.kind for found in sent} == {"all_reduce"}
    # The two gradients; XLA adds up along one mesh axis after the other.
    assert sum(found.bytes for found in sent) == 2 * 4 * (12 * 20 + 20)


def test_sums_of_merged_rows():
    x, one = torch.arange(24.0).reshape(2, 3, 4), torch.arange(6.0).reshape(2, 3, 1)
    wanted, got = [], []
    for found, a, b in ((wanted, x, one), (got, x.to("jax"), one.to("jax"))):
        for dim, keepdim in itertools.product((0, 1, -1, (0, 1)), (True, False)):
            found.append(a.view(6, 4).sum(dim, keepdim))
            found.append(b.view(6, 1).sum(dim, keepdim))
            found.append(a.bfloat16().view(6, 4).sum(dim, keepdim, dtype=torch.float32))
    xs.sync()
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), two)


VIEWS = (
    lambda x: x[1],
    lambda x: x.select(1, 2),
    lambda x: x.view(6, 4),
    lambda x: x.transpose(0, 1).reshape(6, 4),
    lambda x: x.view(3, 8)[:, :4],
    lambda x: x.unbind(0)[0],
    lambda x: x.view(2, 12)[:1].view(3, 4),
)


def test_views_of_more_axes_as_factors():
    """A row taken out of three axes is no merging of them."""
    torch.manual_seed(0)
    tensors = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    wanted, got = [], []
    for found, (x, w, b) in ((wanted, tensors), (got, [t.to("jax") for t in tensors])):
        rows = torch.arange(30.0, device=x.device).view(6, 5)  # a bias for each row is no layer's
        for factors in ({}, {"beta": 2, "alpha": 3}):
            found.append(torch.addmm(rows, x.view(6, 4), w.t(), **factors).view(2, 3, 5))
        for left in (view(x) for view in VIEWS):
            found += [torch.addmm(b, left, w.t()), left @ w.t(), left.t() @ left, left.sum(0, True)]
    xs.sync()
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), two)
