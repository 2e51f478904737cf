"""`torch.ops.xla.*`, and operators that scripts define for the dispatch key XLA."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
import isoshard.torch_bridge.torch_xla  # noqa: F401  (defines them)
from isoshard.torch_bridge.kernels.quantized import QuantizedLinear, quantized_matmul
from isoshard.torch_bridge.torch_xla.core.xla_builder import call_jax
from isoshard.torch_bridge.torch_xla.core.xla_model import XLA_LIB
from isoshard.torch_bridge.torch_xla.experimental import custom_kernel, xla_quantized_matmul

ops = torch.ops.xla


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_flash_attention():
    q, k, v = (data(1, 2, 8, 4, seed=n) for n in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    got = ops.flash_attention(q.to("jax"), k.to("jax"), v.to("jax"), True)
    torch.testing.assert_close(got.cpu(), want)


def test_groups_of_rows():
    lhs, rhs, sizes = data(6, 4), data(2, 4, 3, seed=1), torch.tensor([2, 4], dtype=torch.int32)
    given = lhs.to("jax"), rhs.to("jax"), sizes.to("jax")
    want = torch.cat([lhs[:2] @ rhs[0], lhs[2:] @ rhs[1]])
    torch.testing.assert_close(ops.gmm(*given).cpu(), want)
    torch.testing.assert_close(ops.gmm(*given, [2, 2, 2]).cpu(), want)
    got = ops.tgmm(given[0].t(), want.to("jax"), given[2]).cpu()
    torch.testing.assert_close(got, torch.stack([lhs[:2].t() @ want[:2], lhs[2:].t() @ want[2:]]))


def test_pages_of_keys():
    q, pages = data(2, 4, 8).to("jax"), data(1, 6, 4, 8, seed=1).to("jax")
    lengths = torch.tensor([5, 8], dtype=torch.int32).to("jax")
    where = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).to("jax")
    want = custom_kernel.paged_attention(q, pages, pages, lengths, where, 1)
    got = ops.paged_attention(q, pages, pages, lengths, where, 1)
    assert torch.equal(got.cpu(), want.cpu()) and got.shape == (2, 4, 8)


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("pointed", [False, True])
def test_a_matrix_of_int8(device, rounded, pointed):
    x = data(2, 5, 16)
    weight = torch.randint(-128, 128, (3, 16), dtype=torch.int8)
    scale, point = data(3, seed=1).abs(), data(3, seed=2)
    exact = x @ (weight * scale[:, None]).t() - (x.sum(-1, keepdim=True) * point if pointed else 0)
    got = ops.quantized_matmul(
        x.to(device),
        weight.to(device),
        scale.to(device),
        point.to(device) if pointed else None,
        quantize_activation=rounded,
    )
    slack = 0.02 if rounded else 1e-5
    torch.testing.assert_close(got.cpu(), exact, rtol=slack, atol=slack * exact.abs().max().item())


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_matrix_of_int8_in_blocks(device):
    x, weight = data(5, 16), torch.randint(-8, 8, (4, 4, 3), dtype=torch.int8)
    scale, point = data(4, 3, seed=1), data(4, 3, seed=2)
    whole = (weight * scale[:, None] - point[:, None]).reshape(16, 3)
    got = ops.quantized_matmul(
        x.to(device), weight.to(device), scale.to(device), point.to(device), block_size=4
    )
    torch.testing.assert_close(got.cpu(), x @ whole, rtol=1e-4, atol=1e-4)


def test_shapes_of_quantized_products_are_checked():
    x, weight, scale = data(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(3)
    for wrong in (
        (x, weight.float(), scale),
        (x, weight[:, :2], scale),
        (x, weight, scale[:2]),
        (x, weight, scale, torch.ones(2)),
    ):
        with pytest.raises(ValueError, match=r"takes an int8 w \(outputs, 4\) and scaler"):
            quantized_matmul(*wrong)
    blocks = torch.ones(2, 2, 3, dtype=torch.int8), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"w \(4 / 3, 3, outputs\)"):
        quantized_matmul(x, *blocks, block_size=3)
    with pytest.raises(ValueError, match="only with one scale for each output"):
        quantized_matmul(x, *blocks, block_size=2, quantize_activation=True)


@pytest.mark.parametrize("block_size", [-1, 4])
def test_a_quantized_layer_on_the_device(block_size):
    layer = xla_quantized_matmul.XlaQuantizedLinear(8, 3, block_size=block_size)
    assert isinstance(layer, QuantizedLinear)
    shape = (3, 8) if block_size == -1 else (2, 4, 3)
    scales = (3,) if block_size == -1 else (2, 3)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    layer.load_quantized_weight(weight, data(*scales), data(*scales, seed=1))
    x = data(2, 8)
    want = layer(x)
    # sums of products of up to 128 that cancel: close to their terms, not to what is left
    torch.testing.assert_close(layer.to("jax")(x.to("jax")).cpu(), want, rtol=1.3e-6, atol=1e-4)
    assert set(layer.state_dict()) == {"weight", "weight_scaler", "zero_point"}
    with pytest.raises(ValueError, match="int8"):
        layer.load_quantized_weight(weight.float(), data(*scales))


def test_a_mark_in_a_compiled_function():
    mesh = "('x', 'y')"

    def f(x, weight):
        marked = ops.dynamo_mark_sharding(weight, list(range(8)), [2, 4], mesh, "('x', None)")
        return x @ marked

    x, weight = data(4, 8), data(8, 4, seed=1)
    for call in (f, torch.compile(f, backend="isoshard")):
        got = call(x.to("jax"), weight.to("jax"))
        torch.testing.assert_close(got.cpu(), x @ weight)
    there = weight.to("jax")
    ops.dynamo_mark_sharding(there, list(range(8)), [2, 4], mesh, "('x', None)")
    assert there.sharding_spec == "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    assert torch.equal(ops.dynamo_mark_sharding(weight, [0], [1], "('x',)", "(0, None)"), weight)


def test_a_mark_whose_result_is_not_used_stays_in_the_graph():
    def f(x):
        doubled = x * 2
        names = "('x', 'y')"
        ops.dynamo_mark_sharding(doubled, list(range(8)), [2, 4], names, names)
        return doubled

    got = torch.compile(f, backend="isoshard")(data(4, 8).to("jax"))
    xs.sync()
    assert [piece.data.shape for piece in got.local_shards] == [(2, 2)] * 8
    torch.testing.assert_close(got.cpu(), data(4, 8) * 2)


def test_operators_in_a_compiled_function():
    q = data(1, 2, 8, 4)
    f = torch.compile(lambda q: ops.flash_attention(q * 2, q, q).sum(), backend="isoshard")
    want = torch.nn.functional.scaled_dot_product_attention(q * 2, q, q, scale=1.0).sum()
    torch.testing.assert_close(f(q.to("jax")).cpu(), want)


def test_an_operator_of_a_script():
    """As vLLM defines its own: a schema, a kernel for XLA that calls JAX, one for shapes."""
    XLA_LIB.define("bent(Tensor x, Tensor y) -> Tensor")
    calls = []

    @torch.library.impl(XLA_LIB, "bent", "XLA")
    def bent(x, y):
        calls.append(x.device.type)
        return call_jax(lambda a, b: a * b + 1, (x, y))

    @torch.library.impl(XLA_LIB, "bent", "CompositeExplicitAutograd")
    def bent_elsewhere(x, y):
        return torch.empty_like(x)

    x = data(3)
    want = x * x + 1
    torch.testing.assert_close(ops.bent(x.to("jax"), x.to("jax")).cpu(), want)
    compiled = torch.compile(lambda a: ops.bent(a, a) * 2, backend="isoshard")
    torch.testing.assert_close(compiled(x.to("jax")).cpu(), want * 2)
    assert calls and set(calls) == {"jax"}
    mesh = xs.Mesh(range(3), (3,), ("x",))
    split = xs.mark_sharding(x.to("jax"), mesh, ("x",))
    torch.testing.assert_close(ops.bent(split, split).cpu(), want)
