"""Products on axes as they were before torch merged and transposed them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.torch_bridge.engine.compiling.products import Matrix, product

SHAPES = [(3, 4), (2, 3, 4), (5, 4), (2, 2, 3, 4)]


def meant(matrix):
    flat = np.asarray(matrix.array).reshape(-1, matrix.array.shape[-1])
    return flat.T if matrix.turned else flat


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SHAPES, SHAPES)))
def test_every_pair_that_fits(left, right):
    rng = np.random.default_rng(0)
    seen = 0
    for turns in itertools.product((False, True), repeat=2):
        a, b = (
            Matrix(jnp.asarray(rng.normal(size=shape), jnp.float32), turned)
            for shape, turned in zip((left, right), turns, strict=True)
        )
        if meant(a).shape[1] != meant(b).shape[0]:
            continue
        seen += 1
        merged, apart = product(a, b)
        np.testing.assert_allclose(merged, meant(a) @ meant(b), rtol=1e-5, atol=1e-6)
        assert (apart is not None) == (len(left) > 2 and not a.turned)
        if apart is not None:
            assert apart.shape[:-1] == left[:-1]
            np.testing.assert_array_equal(apart.reshape(merged.shape), merged)
    assert seen or left[-1] != right[-1]


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
EXTENTS = [(1, 4, 2, 2), (1, 3, 2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3, 3), (2, 2)]


@pytest.mark.parametrize("rearranged", REARRANGED.values(), ids=REARRANGED)
@pytest.mark.parametrize("size", EXTENTS, ids=str)
def test_sums_over_axes_that_look_like_merged_rows(rearranged, size):
    numbers = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
    x, y = rearranged(numbers), rearranged(numbers.to("jax"))
    axes = range(x.dim())
    wanted, got = {}, {}
    for count in range(1, x.dim() + 1):
        for key in itertools.product(itertools.combinations(axes, count), (True, False)):
            wanted[key], got[key] = x.sum(*key), y.sum(*key)
    for key, want in wanted.items():
        assert torch.equal(got[key].cpu(), want), key


@pytest.mark.parametrize("one", REARRANGED.values(), ids=REARRANGED)
@pytest.mark.parametrize("size", [size for size in EXTENTS if len(size) > 2], ids=str)
def test_products_of_what_looks_like_merged_rows(one, size):
    numbers = torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)
    wanted, got = {}, {}
    for name, two in REARRANGED.items():
        a, b = one(numbers), two(numbers)
        c, d = one(numbers.to("jax")), two(numbers.to("jax"))
        for turned in (False, True):
            left, right = a.shape, (b.mT if turned else b).shape
            if left[-1] == right[-2] and left[:-2] == right[:-2]:
                want = wanted[name, turned] = a @ (b.mT if turned else b)
                have = got[name, turned] = c @ (d.mT if turned else d)
                wanted[name, turned, "rows"] = want.flatten(0, -2).sum(0, keepdim=True)
                got[name, turned, "rows"] = have.flatten(0, -2).sum(0, keepdim=True)
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


def test_a_bias_for_each_row(mesh):
    """`addmm` with a matrix, and with factors, is not a layer."""
    torch.manual_seed(0)
    bias, x, weight = torch.randn(6, 5), torch.randn(2, 3, 4), torch.randn(5, 4)
    for factors in ({}, {"beta": 2, "alpha": 3}):
        expected = torch.addmm(bias, x.view(6, 4), weight.t(), **factors).view(2, 3, 5)
        there = [t.to("jax") for t in (bias, x, weight)]
        got = torch.addmm(there[0], there[1].view(6, 4), there[2].t(), **factors).view(2, 3, 5)
        torch.testing.assert_close(got.cpu(), expected)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 1)])
def test_sums_of_merged_rows(dim, keepdim):
    x = torch.arange(24.0).reshape(2, 3, 4)
    expected = x.view(6, 4).sum(dim, keepdim)
    torch.testing.assert_close(x.to("jax").view(6, 4).sum(dim, keepdim).cpu(), expected)
    one = torch.arange(6.0).reshape(2, 3, 1)
    torch.testing.assert_close(
        one.to("jax").view(6, 1).sum(dim, keepdim).cpu(), one.view(6, 1).sum(dim, keepdim)
    )
    half = x.bfloat16()
    torch.testing.assert_close(
        half.to("jax").view(6, 4).sum(dim, keepdim, dtype=torch.float32).cpu(), expected
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x.select(1, 2),
        lambda x: x.view(6, 4),
        lambda x: x.transpose(0, 1).reshape(6, 4),
        lambda x: x.view(3, 8)[:, :4],
        lambda x: x.unbind(0)[0],
        lambda x: x.view(2, 12)[:1].view(3, 4),
    ],
)
def test_views_of_more_axes_as_factors(view):
    """A row taken out of three axes is no merging of them."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    there = [t.to("jax") for t in (x, weight, bias)]
    for left, w, b in ((view(x), weight, bias), (view(there[0]), *there[1:])):
        got = [torch.addmm(b, left, w.t()), left @ w.t(), left.t() @ left, left.sum(0, True)]
        if left.device.type == "cpu":
            expected = got
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), two)
