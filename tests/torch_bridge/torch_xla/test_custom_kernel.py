"""torch_xla's kernels by name: against naive torch in float64, with gradients."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.torch_xla.experimental import custom_kernel as ck
from isoshard.torch_bridge.torch_xla.experimental.assume_pure import PureModule
from isoshard.torch_bridge.torch_xla.experimental.scan_layers import scan_layers


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
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.3},
    "segments": {"segments": True},
    "bias": {"ab": True, "scale": 0.5},
    "all": {"causal": True, "segments": True, "ab": True, "scale": 0.7},
}


@pytest.mark.parametrize("lead", [(2,), (3, 2)], ids=["batch", "two batch axes"])
@pytest.mark.parametrize("name", CASES)
def test_flash_attention(x64, name, lead):
    case = CASES[name]
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


def test_flash_attention_of_other_dtypes():
    q, k, v = (data(2, 3, 5, 4, seed=n) for n in range(3))
    want = naive(q, k, v, causal=True, scale=0.5)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        given = [t.to(dtype).to("jax") for t in (q, k, v)]
        got = ck.flash_attention(*given, causal=True, sm_scale=0.5)
        assert got.dtype == dtype
        torch.testing.assert_close(got.cpu().double(), want, rtol=rtol, atol=rtol)


def test_flash_attention_on_a_mesh():
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    q, k, v = (data(4, 8, 6, 4, seed=n).float() for n in range(3))
    want = naive(q, k, v)
    spec = ("x", "y", None, None)
    out = ck.flash_attention(*(t.to("jax") for t in (q, k, v)), partition_spec=spec, mesh=mesh)
    torch.testing.assert_close(out.cpu(), want)
    assert iso.sharding_of(out).spec in (P("x", "y", None, None), P("x", "y"))
    marked = [xs.mark_sharding(t.to("jax"), mesh, spec) for t in (q, k, v)]
    out = ck.FlashAttention.apply(*marked, True)
    torch.testing.assert_close(out.cpu(), naive(q, k, v, causal=True))


def test_flash_attention_in_scanned_layers_and_pure_modules():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return x + attention(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    layers, x = torch.nn.ModuleList(Layer() for _ in range(3)), data(2, 5, 8).float()

    def attention(q, k, v):
        return naive(q, k, v, causal=True)

    want = copy.deepcopy(layers)
    h = x
    for layer in want:
        h = layer(h)
    h.square().sum().backward()

    def attention(q, k, v):  # noqa: F811 (the layers call it by name)
        return ck.flash_attention(q, k, v, causal=True)

    for run in (
        lambda layers, x: scan_layers(layers, x),
        lambda layers, x: PureModule(torch.nn.Sequential(*layers))(x),
    ):
        ours = copy.deepcopy(layers).to("jax")
        run(ours, x.to("jax")).square().sum().backward()
        for one, two in zip(ours.parameters(), want.parameters(), strict=True):
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


@pytest.mark.parametrize("length", [5, 6, 9])
def test_repeat_with_fixed_output_size(length):
    values, repeats = torch.arange(10, 14), torch.tensor([2, 0, 3, 1])
    whole = values.repeat_interleave(repeats)
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
    with pytest.raises(ValueError, match=r"was to give .* by its output_shape_dtype_fn, and gives"):
        wrong(x.to("jax"))


def test_small_names():
    ck.jax_import_guard()
    assert ck.convert_torch_dtype_to_jax(torch.bfloat16) == jax.numpy.bfloat16
    struct = ck.to_jax_shape_dtype_struct(torch.ones(2, 3))
    assert (struct.shape, struct.dtype) == ((2, 3), np.float32)
    with pytest.raises(RuntimeError, match="payload of a TPU custom call"):
        ck.trace_pallas(lambda x: x, torch.ones(1))
    assert all(hasattr(ck, name) for name in ck.__all__)
