"""Layouts stay: of gradients, of what is sharded again, and of what windows and transforms make.

What programs send is read off their HLO: rows, and never the field.
"""

import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.domain.traffic import gathered, sent, summed

SIZES = (20, 8, 28, 8)
ROWS = P(None, None, "x")
ROW = 2 * 4 * 16  # elements of a row of the field


@pytest.fixture
def mesh():
    return iso.make_mesh((4,), ("x",))


def laid(x, mesh, spec, sizes=None):
    if sizes is None:
        return iso.shard(x, mesh, spec).requires_grad_()
    return iso.shard(x, mesh, spec, uneven="pad", sizes=sizes).requires_grad_()


def close(found, want, rtol=1e-4):
    top = want.detach().abs().max().item()
    torch.testing.assert_close(
        found.detach().cpu().double(), want.detach(), rtol=rtol, atol=1e-6 * max(top, 1)
    )


def lies_as(gradient, leaf):
    assert gradient.block_sizes == leaf.block_sizes
    assert iso.to_jax(gradient).sharding.spec == leaf.named_sharding.spec


# Gradients

LINEAR = {
    "mean": lambda x: x.mean(),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)).sum(),
    "view": lambda x: x.view(2, 4, -1).sum(),
    "expand": lambda x: x[:, :, :, None].expand(2, 4, 64, 2, 16).sum(),
    "linear": lambda x: F.linear(x, torch.ones(3, 16, device=x.device, dtype=x.dtype)).sum(),
    "conv": lambda x: F.conv2d(
        x, torch.ones(1, 4, 3, 3, device=x.device, dtype=x.dtype), padding=1
    ).mean(),
}


def test_a_constant_gradient_lies_as_its_tensor(mesh):
    x = torch.randn(2, 4, 64, 16)
    fields = {name: laid(x, mesh, ROWS, (None, None, SIZES, None)) for name in LINEAR}
    sum(LINEAR[name](field) for name, field in fields.items()).backward()
    for name, field in fields.items():
        plain = x.double().requires_grad_()
        LINEAR[name](plain).backward()
        lies_as(field.grad, field)
        close(field.grad, plain.grad)


def test_so_does_that_of_a_parameter_and_of_a_bias(mesh):
    weight = torch.nn.Parameter(iso.shard(torch.randn(16, 6), mesh, P("x")))
    (weight * 2).sum().backward()
    lies_as(weight.grad, weight)
    layer = torch.nn.Linear(6, 16).to("jax")
    xs.mark_sharding(layer.bias, mesh, ("x",))
    layer(torch.randn(3, 6, device="jax")).square().sum().backward()
    lies_as(layer.bias.grad, layer.bias)  # a view of a sum


def test_leaves_in_other_blocks_do_not_share_the_layout_of_their_gradient(mesh):
    first = laid(torch.randn(18, 6), mesh, P("x"), (5, 2, 7, 4))
    second = laid(torch.randn(18, 6), mesh, P("x"), (0, 3, 9, 6))
    want = torch.ones(18, 6).double()
    (first + second).sum().backward()
    for leaf in (first, second):
        lies_as(leaf.grad, leaf)
        close(leaf.grad, want)
    first.grad.zero_()
    close(second.grad, want)
    first, second = (laid(torch.randn(16, 8), mesh, s) for s in (P("x"), P(None, "x")))
    ((first + second) * torch.randn(16, 8, device="jax")).sum().backward()
    lies_as(first.grad, first)
    lies_as(second.grad, second)


# Sharded again


def test_to_its_own_layout_is_nothing(mesh):
    t = laid(torch.randn(18, 6), mesh, P("x"), (5, 2, 7, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = t.redistribute(mesh, [Shard(-2)])
    assert same.placements == (Shard(0),)
    assert same.block_sizes == t.block_sizes == ((5, 2, 7, 4), None)
    assert torch.equal(same.cpu(), t.cpu())
    (same * 3).sum().backward()
    lies_as(t.grad, t)


def test_axes_that_stay_split_keep_their_blocks():
    mesh = iso.make_mesh((2, 4), ("a", "b"))
    t = laid(torch.randn(14, 18), mesh, P("a", "b"), ((4, 10), (5, 2, 7, 4)))
    c = torch.randn(14, 18)
    for placements, sizes in (
        ([Shard(0), Replicate()], ((4, 10), None)),
        ([Replicate(), Shard(1)], (None, (5, 2, 7, 4))),
    ):
        t.grad = None
        moved = t.redistribute(mesh, placements)
        assert moved.placements == tuple(placements)
        assert torch.equal(moved.detach().cpu(), t.detach().cpu())
        assert moved.block_sizes == sizes
        (moved * c.to("jax")).sum().backward()
        lies_as(t.grad, t)
        close(t.grad, c.double())
    half = t.redistribute(mesh, [Shard(0), Shard(1)], forward_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.detach().cpu(), t.detach().cpu().bfloat16())


# Views

SHOWN = {
    "transposed": (lambda t: t.t(), (Shard(1),), (1, 0)),
    "columns": (lambda t: t[:, 2:], (Shard(0),), (0, None)),
    "cut columns": (lambda t: t.view(18, 2, 4), (Shard(0),), (0, None, None)),
    "repeated": (lambda t: t[None].expand(3, 18, 8), (Shard(1),), (None, 0, None)),
    "a repeated column": (lambda t: t[:, :1].expand(18, 5), (Shard(0),), (0, None)),
    "rows": (lambda t: t[:8], (Replicate(),), None),
    "flat": (lambda t: t.view(-1), (Replicate(),), None),
}


def test_a_view_tells_how_it_lies(mesh):
    sizes = ((5, 2, 7, 4), None)
    t = laid(torch.randn(18, 8), mesh, P("x"), sizes).detach()
    for view, placements, axes in SHOWN.values():
        seen = view(t)
        assert seen.placements == placements
        assert (seen.mesh == mesh) == (axes is not None)
        wanted = None if axes is None else tuple(None if a is None else sizes[a] for a in axes)
        assert seen.block_sizes == wanted
        assert axes is None or iso.to_jax(seen).sizes == seen.block_sizes
    even = iso.shard(torch.randn(16, 8), mesh, P("x"))
    for view in (even.t(), even.view(16, 2, 4), even[:, :, None].expand(16, 8, 3)):
        assert view.partition_spec == iso.to_jax(view).sharding.spec
        assert view.device_mesh == even.device_mesh
    assert even.t().to_local().shape == (8, 4)
    assert even[:8].partition_spec is None


# Optimizers


def test_loaded_state_lies_in_the_blocks_of_its_parameter(mesh):
    kind, options = torch.optim.AdamW, {"lr": 0.1}
    start, c = torch.randn(18, 6), torch.randn(18, 6)

    def stepped(weight, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            (weight.square() * c.to(weight.device)).sum().backward()
            optimizer.step()

    def moved(make, to):
        first = torch.nn.Parameter(make(start))
        before = kind([first], **options)
        stepped(first, before)
        second = torch.nn.Parameter(to(first.detach()))
        after = kind([second], **options)
        after.load_state_dict(before.state_dict())
        held = {key: slot for key, slot in after.state[second].items() if slot.ndim}
        stepped(second, after)
        return first, before, second, after, held

    old, new = (5, 2, 7, 4), (0, 3, 9, 6)
    first, before, second, after, held = moved(
        lambda x: laid(x, mesh, P("x"), old).detach(),
        lambda x: laid(x.cpu(), mesh, P("x"), new).detach(),
    )
    assert held
    for key, slot in held.items():
        assert slot.block_sizes == (new, None)
        assert after.state[second][key].block_sizes == (new, None)
        assert before.state[first][key].block_sizes == (old, None)  # nobody moves what is saved
    *_, plain, _, _ = moved(lambda x: x.clone(), lambda x: x.clone())
    close(second, plain.double())


# Windows

WINDOWS = {
    "max 3/2/1": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg 3/2/1 of real rows": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "bilinear, corners": lambda x: F.interpolate(x, (32, 8), mode="bilinear", align_corners=True),
    "adaptive avg, overlapping": lambda x: F.adaptive_avg_pool2d(x, (16, 5)),
}


def slopes(functions, fields):
    """Of the squares of some results, by a tensor of their own each."""
    total = sum(functions[name](x).square().sum() for name, x in fields.items())
    return dict(zip(fields, torch.autograd.grad(total, [*fields.values()]), strict=True))


def test_windows_of_an_even_split_send_rows(mesh):
    x = torch.randn(2, 4, 64, 16)
    want = slopes(WINDOWS, {name: x.double().requires_grad_() for name in WINDOWS})
    fields = {name: laid(x, mesh, ROWS) for name in WINDOWS}
    compiled = xs.compile(lambda fields: slopes(WINDOWS, fields))
    for _ in range(2):
        found = compiled(fields)
    for name, right in want.items():
        close(found[name], right)
        lies_as(found[name], fields[name])
    text = xs.program_text(compiled)
    assert gathered(text) == 0
    assert summed(text) == 0
    # Of each, both sides: forward, and backward the field and the gradients.
    assert sent(text) <= len(fields) * 8 * ROW


CONVOLUTIONS = {
    "dilated": ((6, 4, 3, 3), lambda x, w: F.conv2d(x, w, padding=2, dilation=2)),
    "depthwise": ((4, 1, 7, 7), lambda x, w: F.conv2d(x, w, padding=3, groups=4)),
    "transposed 3": (
        (4, 3, 3, 3),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
    ),
}


FORMATS = (torch.contiguous_format, torch.channels_last)


def convolved(operands):
    """The result of each convolution, and the gradients of its squares."""
    found = {}
    for name, (x, w) in operands.items():
        y = CONVOLUTIONS[name][1](x, w)
        found[name] = y, *torch.autograd.grad(y.square().sum(), (x, w))
    return found


def test_convolutions_of_an_even_split_send_rows(mesh):
    whole, parts = {}, {}
    for number, (name, (size, _)) in enumerate(CONVOLUTIONS.items()):
        x, w = torch.randn(2, 4, 64, 16), torch.randn(size)
        x = x.contiguous(memory_format=FORMATS[number % 2])
        whole[name] = x.double().requires_grad_(), w.double().requires_grad_()
        parts[name] = laid(x, mesh, ROWS), w.to("jax").requires_grad_()
    compiled = xs.compile(convolved)
    for _ in range(2):
        found = compiled(parts)
    for name, want in convolved(whole).items():
        for one, other in zip(found[name], want, strict=True):
            close(one, other)
        lies_as(found[name][1], parts[name][0])
    text, count = xs.program_text(compiled), len(CONVOLUTIONS)
    assert gathered(text) == 0
    assert summed(text) <= max(w.numel() for _, w in whole.values())
    # Of each, rows on both sides of the field, its result and gradients.
    assert sent(text) <= count * 16 * 2 * 6 * 32
    # Of convolutions in groups XLA for CPUs makes gradients that take many times the field.
    assert text.count("feature_group_count") <= count  # forward


def test_halves_and_three_axes(mesh):
    x = torch.randn(1, 2, 16, 4, 4)
    field = laid(x, mesh, ROWS)
    plain = x.double().requires_grad_()
    results = [F.max_pool3d(F.avg_pool3d(t, 3, 1, 1), 3, 2, 1) for t in (field, plain)]
    for one in results:
        one.square().sum().backward()
    close(*results)
    close(field.grad, plain.grad)
    wide = torch.randn(1, 2, 16, 8, dtype=torch.float64)  # 64 bits
    plain, field = wide.clone().requires_grad_(), laid(wide, mesh, ROWS)
    for one in (plain, field):
        WINDOWS["avg 3/2/1 of real rows"](one).square().sum().backward()
    torch.testing.assert_close(field.grad.cpu(), plain.grad)
    whole = torch.randint(-9, 9, (1, 2, 16, 8))
    found = F.max_pool2d(iso.shard(whole, mesh, ROWS), 3, 2, 1)
    assert torch.equal(found.cpu(), F.max_pool2d(whole, 3, 2, 1))
    half = iso.shard(torch.randn(1, 2, 16, 4).bfloat16(), mesh, ROWS)
    pools = lambda x: (F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 2, 1))  # noqa: E731
    for one, other in zip(pools(half), pools(half.cpu()), strict=True):
        assert torch.equal(one.cpu(), other)


RUNNING = {
    "cumsum": lambda x: x.cumsum(2),
    "along another": lambda x: x.cumsum(3) + x.cumsum(-4),
    "bfloat16": lambda x: x.bfloat16().cumsum(2, dtype=torch.float32),
}


def test_running_sums_of_an_even_split_send_totals(mesh):
    x = torch.randn(2, 4, 64, 16)
    wide = {name: x.clone() if name == "bfloat16" else x.double() for name in RUNNING}
    want = slopes(RUNNING, {name: plain.requires_grad_() for name, plain in wide.items()})
    fields = {name: laid(x, mesh, ROWS) for name in RUNNING}
    compiled = xs.compile(lambda fields: slopes(RUNNING, fields))
    for _ in range(2):
        found = compiled(fields)
    for name, right in want.items():
        close(found[name], right.double(), 1e-3)
        lies_as(found[name], fields[name])
    text = xs.program_text(compiled)
    assert max(gathered(text), summed(text)) <= 4 * ROW  # one row from each device


# Shapes


def test_blocks_of_a_merged_axis(mesh):
    t = laid(torch.randn(18, 6), mesh, P("x"), (5, 2, 7, 4))
    flat = (t + 1).reshape(-1) * 2
    torch.testing.assert_close(flat.cpu(), (t.cpu() + 1).reshape(-1) * 2)
    assert flat.block_sizes == ((30, 12, 42, 24),)
    cut = laid(torch.randn(36, 4), mesh, P("x"), (10, 4, 14, 8))
    pairs = (cut * 2).reshape(18, 2, 4) + 1
    torch.testing.assert_close(pairs.cpu(), (cut.cpu() * 2).reshape(18, 2, 4) + 1)
    assert pairs.block_sizes == ((5, 2, 7, 4), None, None)


# Attention


def test_multihead_attention_goes_round_a_ring(mesh):
    ours = torch.nn.MultiheadAttention(16, 2)
    plain = torch.nn.MultiheadAttention(16, 2).double()
    plain.load_state_dict(ours.state_dict())
    ours.to("jax")

    def step(module, x):
        y = module(x, x, x, need_weights=False)[0]
        return y, torch.autograd.grad(y.square().sum(), [x, *module.parameters()])

    x = torch.randn(64, 2, 16)
    tokens = laid(x, mesh, P("x"), (SIZES, None, None))
    want = step(plain, x.double().requires_grad_())
    compiled = xs.compile(step)
    for _ in range(2):
        out, gradients = compiled(ours, tokens)
    text = xs.program_text(compiled)
    assert gathered(text) == 0
    assert sent(text) > 0
    assert out.placements == tokens.placements
    assert out.block_sizes == gradients[0].block_sizes == tokens.block_sizes
    for one, other in zip((out, *gradients), (want[0], *want[1]), strict=True):
        close(one, other, 1e-3)


# Lengths
