"""torch_xla's kernels by name, `torch.ops.xla.*`, and operators that scripts define."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
import isoshard.torch_xla_bridge.torch_xla  # (defines them)
from isoshard import P
from isoshard.torch_bridge.kernels.quantized import QuantizedLinear, quantized_matmul
from isoshard.torch_xla_bridge.torch_xla.core.xla_builder import call_jax
from isoshard.torch_xla_bridge.torch_xla.core.xla_model import XLA_LIB
from isoshard.torch_xla_bridge.torch_xla.experimental import custom_kernel, xla_quantized_matmul
from isoshard.torch_xla_bridge.torch_xla.experimental import custom_kernel as ck
from isoshard.torch_xla_bridge.torch_xla.experimental.assume_pure import PureModule
from isoshard.torch_xla_bridge.torch_xla.experimental.scan_layers import scan_layers


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(q, k, v, *, causal=False, segments=None, scale=1.0, ab=None):
    scores = q @ k.transpose(-1, -2)
    if ab is not None:
        scores = scores + ab
    scores = scores * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if segments is not None:
        seen = seen & (segments[0][..., :, None] == segments[1][..., None, :])[..., None, :, :]
    return scores.masked_fill(~seen, ck.DEFAULT_MASK_VALUE).softmax(-1) @ v


CASES = {
    "bias": {"ab": True, "scale": 0.5},
    "all": {"causal": True, "segments": True, "ab": True, "scale": 0.7},
}


@pytest.mark.parametrize("name", CASES)
def test_flash_attention(x64, name):
    case = CASES[name]
    lead = (3, 2) if case.get("segments") else (2,)  # one batch axis, or two
    host = [data(*lead, 3, 5, 4), data(*lead, 3, 7, 4, seed=1), data(*lead, 3, 7, 4, seed=2)]
    if case.get("ab"):
        host.append(data(*lead, 3, 5, 7, seed=3))
    segments = None
    if case.get("segments"):
        segments = (torch.arange(5) // 3).expand(*lead, 5), (torch.arange(7) // 4).expand(*lead, 7)
    want = [t.clone().requires_grad_() for t in host]
    got = [t.to("jax").requires_grad_() for t in host]
    options = {"causal": case.get("causal", False), "scale": case.get("scale", 1.0)}
    out = naive(*want[:3], **options, segments=segments, ab=want[3] if len(want) > 3 else None)
    numbers = [None, None] if segments is None else [s.to("jax") for s in segments]
    ours = ck.flash_attention(
        *got[:3],
        options["causal"],
        *numbers,
        options["scale"],
        ab=got[3] if len(got) > 3 else None,
    )
    torch.testing.assert_close(ours.detach().cpu(), out.detach(), rtol=1e-9, atol=1e-9)
    out.sin().sum().backward()
    ours.sin().sum().backward()
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-9, atol=1e-9)


def test_flash_attention_on_a_mesh():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    q, k, v = (data(4, 8, 6, 4, seed=n).float() for n in range(3))
    want = naive(q, k, v)
    spec = ("x", "y", None, None)
    half = ck.flash_attention(*(t.bfloat16().to("jax") for t in (q, k, v)), sm_scale=1.0)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.cpu().float(), want, rtol=3e-2, atol=3e-2)
    out = ck.flash_attention(*(t.to("jax") for t in (q, k, v)), partition_spec=spec, mesh=mesh)
    torch.testing.assert_close(out.cpu(), want)
    assert iso.sharding_of(out).spec in (P("x", "y", None, None), P("x", "y"))
    marked = [xs.mark_sharding(t.to("jax"), mesh, spec) for t in (q, k, v)]
    out = ck.FlashAttention.apply(*marked, True)
    torch.testing.assert_close(out.cpu(), naive(q, k, v, causal=True))
    bias = data(4, 8, 6, 6, seed=3).float().to("jax")
    out = ck.FlashAttention.apply(*marked, False, None, None, 1.0, bias, spec, mesh)
    named = ck.flash_attention(*marked, ab=bias, partition_spec=spec, mesh=mesh)
    torch.testing.assert_close(out, named, rtol=0, atol=0)


def test_flash_attention_in_scanned_layers_and_pure_modules():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            attend = naive if x.device.type == "cpu" else ck.flash_attention
            return x + attend(q, k, v, causal=True).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    layers, x = torch.nn.ModuleList(Layer() for _ in range(2)), data(2, 5, 8).float()
    ours = [copy.deepcopy(layers).to("jax") for _ in range(2)]
    torch.nn.Sequential(*layers)(x).square().sum().backward()
    scan_layers(ours[0], x.to("jax")).square().sum().backward()
    PureModule(torch.nn.Sequential(*ours[1]))(x.to("jax")).square().sum().backward()
    for each in ours:
        for one, two in zip(each.parameters(), layers.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-3, atol=1e-4)


def test_flash_attention_mistakes():
    q = torch.ones(1, 2, 3, 4, device="jax")
    with pytest.raises(ValueError, match="q_segment_ids and kv_segment_ids together"):
        ck.flash_attention(q, q, q, False, torch.ones(1, 3, device="jax"))
    with pytest.raises(ValueError, match=r"got \(1, 2, 3, 4\), \(1, 2, 4\) and \(1, 2, 4\)"):
        ck.flash_attention(q, q[:, :, 0], q[:, :, 0])
    with pytest.raises(ValueError, match="needs a mesh"):
        ck.flash_attention(q, q, q, partition_spec=("x", None, None, None))


def attend(q, k, v, seen, scale=1.0, cap=None):
    """(queries, heads, width) to (keys, fewer heads, width)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_paged_attention(x64, cap):
    q, pages = data(3, 4, 8), [data(2, 10, 4, 8, seed=n) for n in (1, 2)]
    lengths = torch.tensor([5, 1, 12], dtype=torch.int32)
    indices = torch.tensor([[3, 1, 9], [0, 0, 0], [7, 2, 5]], dtype=torch.int32)
    want = []
    for n, length in enumerate(lengths):
        k, v = (p[:, indices[n]].reshape(2, 12, 8)[:, :length].transpose(0, 1) for p in pages)
        want.append(attend(q[n : n + 1], k, v, torch.ones(1, int(length)).bool(), cap=cap)[0])
    args = [t.to("jax") for t in (q, *pages, lengths, indices)]
    got = ck.paged_attention(*args, pages_per_compute_block=2, attn_logits_soft_cap=cap)
    torch.testing.assert_close(got.cpu(), torch.stack(want), rtol=1e-9, atol=1e-9)


def test_multi_queries_paged_attention(x64):
    q, pages = data(2, 3, 4, 8), [data(2, 10, 4, 8, seed=n) for n in (1, 2)]
    lengths, effective = torch.tensor([9, 6]), torch.tensor([3, 2])
    indices = torch.tensor([[3, 1, 9], [4, 6, 8]])
    args = [t.to("jax") for t in (q, *pages, lengths, indices, effective)]
    got = ck.multi_queries_paged_attention(*args, 1, 1).cpu()
    for n, (length, queries) in enumerate(zip(lengths, effective, strict=True)):
        k, v = (p[:, indices[n]].reshape(2, 12, 8)[:, :length].transpose(0, 1) for p in pages)
        last = length - queries + torch.arange(int(queries))
        seen = torch.arange(int(length)) <= last[:, None]
        want = attend(q[n, :queries], k, v, seen)
        torch.testing.assert_close(got[n, :queries], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3, "soft_cap": 4.0, "k_scale": 0.5}])
def test_ragged_paged_attention(x64, options):
    q, pages = data(9, 4, 8).float(), data(10, 4, 4, 8, seed=1).float()
    kv_lens, begins = torch.tensor([6, 9, 0]), torch.tensor([0, 3, 7, 7])
    indices = torch.tensor([[3, 1, 9], [4, 6, 8], [0, 0, 0]])
    args = [t.to("jax") for t in (q, pages, kv_lens, indices, begins, torch.tensor([2]))]
    got = ck.ragged_paged_attention(*args, sm_scale=0.3, **options).cpu()
    assert not got[7:].any()
    for n in range(2):
        both = pages[indices[n]].reshape(12, 4, 8)[: kv_lens[n]]
        k, v = both[:, 0::2] * options.get("k_scale", 1.0), both[:, 1::2]
        mine = slice(int(begins[n]), int(begins[n + 1]))
        count = mine.stop - mine.start
        last = kv_lens[n] - count + torch.arange(count)[:, None]
        at = torch.arange(int(kv_lens[n]))
        seen = (at <= last) & (at > last - options.get("sliding_window", 100))
        want = attend(q[mine], k, v, seen, 0.3, options.get("soft_cap"))
        torch.testing.assert_close(got[mine], want, rtol=1e-5, atol=1e-5)


def test_grouped_products_and_their_gradients(x64):
    sizes = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    x, w = data(6, 3), data(4, 3, 5)
    groups = torch.repeat_interleave(torch.arange(4), sizes.long())
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    want = torch.einsum("mk,mkn->mn", a, b[groups])
    want.sin().sum().backward()
    c, d = x.to("jax").requires_grad_(), w.to("jax").requires_grad_()
    got = ck.gmm(c, d, sizes.to("jax"), (2, 2, 2))
    got.sin().sum().backward()
    torch.testing.assert_close(got.detach().cpu(), want.detach())
    torch.testing.assert_close(c.grad.cpu(), a.grad)
    torch.testing.assert_close(d.grad.cpu(), b.grad)
    grads = ck.gmm_backward(want.detach().cos().to("jax"), c.detach(), d.detach(), sizes.to("jax"))
    torch.testing.assert_close(grads[0].cpu(), a.grad)
    torch.testing.assert_close(grads[1].cpu(), b.grad)
    turned = ck.gmm(c, d.transpose(1, 2), sizes.to("jax"), transpose_rhs=True)
    torch.testing.assert_close(turned.detach().cpu(), want.detach())
    offset = torch.tensor([2], dtype=torch.int32).to("jax")
    part = ck.gmm(c, d[2:], sizes.to("jax"), group_offset=offset).detach().cpu()
    torch.testing.assert_close(part, want.detach() * (groups >= 2)[:, None])
    some = ck.tgmm(
        c.detach().t(), got.detach(), sizes.to("jax"), group_offset=offset, num_actual_groups=2
    )
    every = torch.stack([x[groups == n].t() @ want.detach()[groups == n] for n in range(4)])
    torch.testing.assert_close(some.cpu(), every[2:])


def test_products_with_int8():
    x, scale = data(4, 16).float(), data(6).float().abs() / 100
    w = torch.randint(-128, 128, (6, 16), dtype=torch.int8)
    args = [t.to("jax") for t in (x, w, scale)]
    want = x @ (w.float() * scale[:, None]).t()
    torch.testing.assert_close(ck.quantized_matmul_int8(*args).cpu(), want, rtol=1e-4, atol=1e-4)
    rounded = ck.quantized_matmul_int8(*args, quantize_activation=True).cpu()
    steps = x.abs().amax(1, keepdim=True) / 127
    by_hand = (torch.round(x / steps).double() @ w.double().t() * scale * steps).float()
    torch.testing.assert_close(rounded, by_hand, rtol=1e-4, atol=1e-4)
    assert (rounded - want).abs().max() < 0.5
    with pytest.raises(ValueError, match="one scale for each output"):
        ck.quantized_matmul_int8(*args, zero_point=args[2])


def test_repeat_with_fixed_output_size():
    values, repeats = torch.arange(10, 14), torch.tensor([2, 0, 3, 1])
    whole = values.repeat_interleave(repeats)
    for length in (5, 6, 9):
        got = ck.repeat_with_fixed_output_size(values.to("jax"), repeats.to("jax"), length)
        want = torch.cat([whole, whole[-1:].expand(10)])[:length]
        np.testing.assert_array_equal(got, want)


def test_a_pallas_kernel():
    from jax.experimental import pallas as pl

    def body(x_ref, o_ref, *, factor):
        o_ref[...] = x_ref[...] * factor

    def scaled(x, factor=2.0):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        kernel = lambda *refs: body(*refs, factor=factor)  # noqa: E731
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    call = ck.make_kernel_from_pallas(scaled, lambda x, *rest: [(x.shape, x.dtype)])
    x = data(8, 4).float()
    torch.testing.assert_close(call(x.to("jax")).cpu(), x * 2)
    torch.testing.assert_close(call(x.to("jax"), 3.0, static_argnums=1).cpu(), x * 3)
    wrong = ck.make_kernel_from_pallas(scaled, lambda x: [((1,), x.dtype)])
    with pytest.raises(ValueError, match=r"returned .*, and its output_shape_dtype_fn"):
        wrong(x.to("jax"))


def test_small_names():
    ck.jax_import_guard()
    assert ck.convert_torch_dtype_to_jax(torch.bfloat16) == jax.numpy.bfloat16
    struct = ck.to_jax_shape_dtype_struct(torch.ones(2, 3))
    assert (struct.shape, struct.dtype) == ((2, 3), np.float32)
    with pytest.raises(RuntimeError, match="payload of a TPU custom call"):
        ck.trace_pallas(lambda x: x, torch.ones(1))
    assert all(hasattr(ck, name) for name in ck.__all__)


# --- Operators -----------------------------------------------------------------------------------


ops = torch.ops.xla


def floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kernels_by_operator():
    q, k, v = (floats(1, 2, 8, 4, seed=n) for n in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    f = torch.compile(lambda *given: ops.flash_attention(*given, True), backend="isoshard")
    torch.testing.assert_close(f(*(t.to("jax") for t in (q, k, v))).cpu(), want)
    q, pages = floats(2, 4, 8).to("jax"), floats(1, 6, 4, 8, seed=1).to("jax")
    lengths = torch.tensor([5, 8], dtype=torch.int32).to("jax")
    where = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).to("jax")
    want = custom_kernel.paged_attention(q, pages, pages, lengths, where, 1)
    got = ops.paged_attention(q, pages, pages, lengths, where, 1)
    assert torch.equal(got.cpu(), want.cpu()) and got.shape == (2, 4, 8)
    lhs, rhs, sizes = floats(6, 4), floats(2, 4, 3, seed=1), torch.tensor([2, 4], dtype=torch.int32)
    given = lhs.to("jax"), rhs.to("jax"), sizes.to("jax")
    want = torch.cat([lhs[:2] @ rhs[0], lhs[2:] @ rhs[1]])
    torch.testing.assert_close(ops.gmm(*given, [2, 2, 2]).cpu(), want)
    got = ops.tgmm(given[0].t(), want.to("jax"), given[2]).cpu()
    torch.testing.assert_close(got, torch.stack([lhs[:2].t() @ want[:2], lhs[2:].t() @ want[2:]]))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_matrix_of_int8(device):
    x, weight = floats(2, 5, 16), torch.randint(-128, 128, (3, 16), dtype=torch.int8)
    scale, point = floats(3, seed=1).abs(), floats(3, seed=2)
    whole = weight * scale[:, None]
    for rounded, exact, more in (
        (True, x @ whole.t(), ()),
        (False, x @ whole.t() - x.sum(-1, keepdim=True) * point, (point.to(device),)),
    ):
        arguments = (x.to(device), weight.to(device), scale.to(device), *more)
        got = ops.quantized_matmul(*arguments, quantize_activation=rounded)
        slack = 0.02 if rounded else 1e-5
        near = slack * exact.abs().max().item()
        torch.testing.assert_close(got.cpu(), exact, rtol=slack, atol=near)
    x, weight = floats(5, 16), torch.randint(-8, 8, (4, 4, 3), dtype=torch.int8)  # in blocks
    scale, point = floats(4, 3, seed=1), floats(4, 3, seed=2)
    whole = (weight * scale[:, None] - point[:, None]).reshape(16, 3)
    got = ops.quantized_matmul(*(t.to(device) for t in (x, weight, scale, point)), block_size=4)
    torch.testing.assert_close(got.cpu(), x @ whole, rtol=1e-4, atol=1e-4)


def test_shapes_of_quantized_products_are_checked():
    x, weight, scale = floats(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(3)
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


def test_a_quantized_layer_on_the_device():
    for block_size, shape, scales in ((-1, (3, 8), (3,)), (4, (2, 4, 3), (2, 3))):
        layer = xla_quantized_matmul.XlaQuantizedLinear(8, 3, block_size=block_size)
        assert isinstance(layer, QuantizedLinear)
        weight = torch.randint(-128, 128, shape, dtype=torch.int8)
        layer.load_quantized_weight(weight, floats(*scales), floats(*scales, seed=1))
        x = floats(2, 8)
        want, got = layer(x), layer.to("jax")(x.to("jax")).cpu()
        # sums of products of up to 128 that cancel: close to their terms, not to what is left
        torch.testing.assert_close(got, want, rtol=1.3e-6, atol=1e-4)
        assert set(layer.state_dict()) == {"weight", "weight_scaler", "zero_point"}
    with pytest.raises(ValueError, match="int8"):
        layer.load_quantized_weight(weight.float(), floats(*scales))


def test_a_mark_in_a_compiled_function():
    ids, names = list(range(8)), "('x', 'y')"

    def f(x, weight):
        marked = ops.dynamo_mark_sharding(weight, ids, [2, 4], names, "('x', None)")
        doubled = x * 2
        ops.dynamo_mark_sharding(doubled, ids, [2, 4], names, names)  # the result is not used
        return x @ marked, doubled

    x, weight = floats(4, 8), floats(8, 4, seed=1)
    got, doubled = torch.compile(f, backend="isoshard")(x.to("jax"), weight.to("jax"))
    xs.sync()
    torch.testing.assert_close(got.cpu(), x @ weight)
    assert [piece.data.shape for piece in doubled.local_shards] == [(2, 2)] * 8
    torch.testing.assert_close(doubled.cpu(), x * 2)
    there = weight.to("jax")
    ops.dynamo_mark_sharding(there, ids, [2, 4], names, "('x', None)")
    assert there.sharding_spec == "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    assert torch.equal(ops.dynamo_mark_sharding(weight, [0], [1], "('x',)", "(0, None)"), weight)


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

    x = floats(3)
    want = x * x + 1
    torch.testing.assert_close(ops.bent(x.to("jax"), x.to("jax")).cpu(), want)
    compiled = torch.compile(lambda a: ops.bent(a, a) * 2, backend="isoshard")
    torch.testing.assert_close(compiled(x.to("jax")).cpu(), want * 2)
    assert calls and set(calls) == {"jax"}
    mesh = xs.Mesh(range(3), (3,), ("x",))
    split = xs.mark_sharding(x.to("jax"), mesh, ("x",))
    torch.testing.assert_close(ops.bent(split, split).cpu(), want)
