"""Which operator serves attention: entries on the tape, other modes, transforms, mistakes."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.kernels import attention_choice
from tests.torch_bridge.lowerings.test_sdpa import (
    CASES,
    GENERATOR,
    B,
    E,
    H,
    L,
    S,
    compare,
    draw,
    minus_infinity,
    usual,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(autouse=True)
def seeded():
    GENERATOR.manual_seed(0)


def entries() -> list[str]:
    """The names of the operations on this thread's tape that compute, views left out."""
    recorder = tapes.recorder()
    assert isinstance(recorder, tapes.Tape)
    numbers = [entry[0] for entry in recorder.program if isinstance(entry[0], int)]
    return [tapes.RECIPES[number].name for number in numbers]


# torch 2.15 refuses a mask beside `is_causal=True`.
TOGETHER = [name for name, make in CASES.items() if {"attn_mask", "is_causal"} <= set(make()[1])]
TAKEN = [name for name in CASES if attention_choice._masks_add_up() or name not in TOGETHER]


def test_one_entry_forward_and_one_backward():
    for name in TAKEN:
        tensors, options = CASES[name]()
        given = [x.to("jax").requires_grad_() for x in tensors]
        if "attn_mask" in options:
            options["attn_mask"] = options["attn_mask"].to("jax")
        weight = torch.ones(1).to("jax")
        xs.sync()
        out = attend(*given, **options)
        assert len([e for e in entries() if e.startswith("aten::")]) == 1, name
        grad = weight.expand(out.shape)
        torch.autograd.grad(out, given, grad)
        found = [e for e in entries() if e.startswith("aten::")]
        assert len(found) == 2 and found[1] == f"{found[0]}_backward", name
        del out


MISTAKES = {
    "dtypes": (lambda q, k, v: attend(q, k.bfloat16(), v), "same dtype"),
    "width": (lambda q, k, v: attend(q, k[..., :3], v), "size"),
    "heads": (lambda q, k, v: attend(q, k[:, :2], v[:, :2]), "size of tensor"),
    "grouped heads": (lambda q, k, v: attend(q, k[:, :3], v[:, :3], enable_gqa=True), "divide"),
    "mask dtype": (lambda q, k, v: attend(q, k, v, k.new_ones(L, S).long()), "attn_mask dtype"),
    "mask size": (lambda q, k, v: attend(q, k, v, k.new_ones(L, 4)), "size of tensor|broadcast"),
    "one axis": (lambda q, k, v: attend(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), "at least"),
}


def test_mistakes_are_told_by_torch():
    for program, message in MISTAKES.values():
        for device in ("cpu", "jax"):
            with pytest.raises(RuntimeError, match=message):
                program(*(x.to(device) for x in usual()))


def test_the_math_kernel_can_be_chosen():
    tensors = usual()
    want, given = attend(*tensors), [x.to("jax") for x in tensors]
    xs.sync()
    with sdpa_kernel([SDPBackend.MATH]):
        got = attend(*given)
    assert len(entries()) > 2
    torch.testing.assert_close(got.cpu(), want)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        got = attend(*given)
    assert entries() == ["aten::_scaled_dot_product_efficient_attention"]
    torch.testing.assert_close(got.cpu(), want)


UNAVAILABLE = {
    "FLASH_ATTENTION does not take dropout_p=0.5": ("FLASH_ATTENTION", {"dropout_p": 0.5}),
    "CUDNN_ATTENTION is for GPUs, and the devices are of 'cpu'": ("CUDNN_ATTENTION", {}),
}


def test_backends_that_do_not_take_a_call_are_named():
    tensors = [x.to("jax") for x in usual()]
    for message, (backend, options) in UNAVAILABLE.items():
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            with pytest.raises(RuntimeError, match=message):
                attend(*tensors, **options)
        with sdpa_kernel([getattr(SDPBackend, backend), SDPBackend.EFFICIENT_ATTENTION]):
            attend(*tensors, **options)
    xs.sync()


def test_dropout_drops_and_scales():
    q, k = draw(B, H, 64, E).to("jax"), draw(B, H, 64, E).to("jax")
    value = torch.ones(B, H, 64, E, device="jax", requires_grad=True)
    out = attend(q, k, value, dropout_p=0.5)
    found = out.detach()
    assert 0.95 < float(found.mean()) < 1.05 and float(found.std()) > 0.01
    out.sum().backward()
    assert float(value.grad.sum()) == pytest.approx(float(found.sum()), rel=1e-4)
    assert float(attend(q, k, found, dropout_p=1.0).abs().max()) == 0


def test_gradients_of_gradients():
    """The CPU's flash kernel has none, so its products and softmax are the reference."""

    def second(device: str, tensors: Any, options: Any) -> list[torch.Tensor]:
        given = [x.to(device, copy=True).requires_grad_() for x in tensors]
        rest = dict(options)
        if "attn_mask" in rest:
            rest["attn_mask"] = rest["attn_mask"].to(device)
        if device == "cpu" and rest.pop("is_causal", False):
            lower = torch.ones(L, S, dtype=torch.bool).tril()
            mask = rest["attn_mask"]
            is_bool = mask.dtype == torch.bool
            rest["attn_mask"] = mask & lower if is_bool else mask + minus_infinity(lower)
        out = attend(*given, **rest)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        again = torch.autograd.grad(sum(x.sin().sum() for x in first), given)
        return [*first, *again]

    names = {"causal and a mask", "grouped"}.intersection(TAKEN)
    cases = {name: CASES[name]() for name in sorted(names)}
    found = {name: second("jax", *case) for name, case in cases.items()}
    xs.sync()
    for name, got in found.items():
        with sdpa_kernel([SDPBackend.MATH]):
            want = second("cpu", *cases[name])
        compare(got, want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_of_gradients_with_a_mask_that_has_one_and_a_tensor_in_three_places():
    def second(device: str) -> list[torch.Tensor]:
        x, mask = x0.to(device, copy=True), mask0.to(device, copy=True)
        given = [x.requires_grad_(), mask.requires_grad_()]
        out = attend(x, x, x, mask)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), given)]

    x0, mask0 = draw(B, H, L, E), draw(L, L)
    compare(second("jax"), second("cpu"), rtol=1e-4, atol=1e-5)


def test_only_some_gradients_are_wanted():
    tensors, _ = CASES["another width of value"]()
    found: dict[str, list[torch.Tensor]] = {"jax": [], "cpu": []}
    for wanted in ([0], [1], [2], [0, 2]):
        for device, grads in found.items():
            given = [
                x.to(device, copy=True).requires_grad_(n in wanted) for n, x in enumerate(tensors)
            ]
            attend(*given).square().sum().backward()
            assert [x.grad is not None for x in given] == [n in wanted for n in range(3)]
            grads += [given[n].grad for n in wanted]
    xs.sync()
    compare(*found.values(), rtol=1e-5, atol=1e-5)


def _jvp(q, k, v):
    with forward_ad.dual_level():
        out = attend(forward_ad.make_dual(q, v[..., :L, :]), k, v)
        return tuple(forward_ad.unpack_dual(out))


def _square(q, k, v):
    return attend(q, k, v, is_causal=True).square().sum()


TRANSFORMS = {
    "vmap": lambda q, k, v: torch.func.vmap(lambda q, k, v: attend(q, k, v))(q, k, v),
    "jvp": lambda q, k, v: torch.func.jvp(_square, (q, k, v), (v[..., :L, :], k, v)),
    "vmap of grad": torch.func.vmap(torch.func.grad(_square, (0, 2))),
    "dual numbers": _jvp,
}


def test_transforms():
    tensors = usual()
    found = {name: f(*(x.to("jax") for x in tensors)) for name, f in TRANSFORMS.items()}
    xs.sync()
    for name, got in found.items():
        with sdpa_kernel([SDPBackend.MATH]):
            want = TRANSFORMS[name](*tensors)
        wants, gots = (list(x) if isinstance(x, tuple) else [x] for x in (want, got))
        compare(gots, wants, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_autocast_lowers_all_operands():
    tensors, options = CASES["float mask"]()
    given = [x.to("jax").requires_grad_() for x in tensors]
    mask, want = options["attn_mask"].to("jax"), attend(*tensors, **options)
    with torch.autocast("jax", torch.bfloat16):
        out = attend(*given, mask)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert [x.grad.dtype for x in given] == [torch.float32] * 3
    torch.testing.assert_close(out.cpu(), want.bfloat16(), rtol=0.05, atol=0.05)
    xs.sync()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            got = attend(*(x.detach() for x in given), mask)
        assert len(entries()) == 1
        torch.testing.assert_close(got.cpu(), want)


class Layer(nn.Module):
    """Self-attention of several heads; `groups` of key and value."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 4):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.qkv = nn.Linear(width, width + 2 * groups * size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // self.heads
        sizes = [self.heads * size, self.groups * size, self.groups * size]
        q, k, v = (
            part.unflatten(-1, (-1, size)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1)
        )
        y = attend(q, k, v, is_causal=True, enable_gqa=self.groups < self.heads)
        return self.proj(y.transpose(1, 2).flatten(2))


def test_torch_compile_and_a_compiled_step():
    torch.manual_seed(0)
    layer, x = Layer(groups=2), draw(2, 6, 16)
    want = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    moved = copy.deepcopy(layer).to("jax")
    f = torch.compile(moved, backend="isoshard")
    got = torch.autograd.grad(f(x.to("jax")).square().sum(), moved.parameters())
    compare(got, want, rtol=1e-4, atol=1e-5)

    @xs.compile
    def step(x):
        moved.zero_grad()
        moved(x).square().sum().backward()
        return [p.grad.clone() for p in moved.parameters()]

    for _ in range(2):
        compare(step(x.to("jax")), want, rtol=1e-4, atol=1e-5)


def test_as_a_jax_function():
    tensors, options = CASES["bool mask of two axes"]()
    q, k, v = (jax.numpy.asarray(x.numpy()) for x in tensors)
    mask = jax.numpy.asarray(options["attn_mask"].numpy())
    f = iso.jax_function(lambda q, k, v, mask: attend(q, k, v, mask).square().sum())
    got = jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v, mask)
    given = [x.clone().requires_grad_() for x in tensors]
    want = torch.autograd.grad(attend(*given, **options).square().sum(), given)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    mapped = jax.eval_shape(jax.vmap(f, (0, 0, 0, None)), q, k, v, mask)
    assert mapped.shape == (B,)
