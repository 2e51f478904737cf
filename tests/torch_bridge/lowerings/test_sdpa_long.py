"""`scaled_dot_product_attention` of long sequences: numbers, and no array of queries by keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import LlamaConfig, LlamaForCausalLM

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.recompute import checkpoint_module

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

LENGTH = 1100  # no multiple of a tile, a block or a vector
GENERATOR = torch.Generator()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


@pytest.fixture(autouse=True)
def seeded():
    GENERATOR.manual_seed(0)


def mask_of(kind: str, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor | None:
    """Rows of `padding` whose queries come before the first key that is kept see nothing."""
    positions = torch.arange(LENGTH, device=ids.device)
    rows, columns = positions[:, None], positions
    causal = columns <= rows
    if kind == "window":
        return causal & (columns > rows - 200)
    if kind == "padding":
        return causal & keep[:, None, None, :]
    if kind == "packed":
        return causal & (ids[:, None, :, None] == ids[:, None, None, :])
    if kind == "bias":
        far = -(columns - rows).abs().to(torch.float32)[None, None] * 0.1
        return far.masked_fill(~keep[:, None, None, :], -torch.inf)
    return None


KINDS = ("none", "causal", "window", "padding", "packed", "bias")


def results(kind: str, q: Any, k: Any, v: Any, grad: Any, ids: Any, keep: Any) -> list[Any]:
    operands = [x.requires_grad_() for x in (q, k, v)]
    mask = mask_of(kind, ids, keep)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    out = attend(*operands, attn_mask=mask, is_causal=kind == "causal", enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, operands, grad)]


def inputs(batch: int = 2, heads: int = 4, key_heads: int = 2) -> tuple[torch.Tensor, ...]:
    width = 16
    rows = [draw(batch, heads, LENGTH, width) for _ in range(2)]
    columns = [draw(batch, key_heads, LENGTH, width) for _ in range(2)]
    ids = torch.cumsum((torch.rand(batch, LENGTH, generator=GENERATOR) < 0.01).long(), -1)
    keep = torch.ones(batch, LENGTH, dtype=torch.bool)
    keep[0, -37:], keep[1, :50] = False, False
    return rows[0], *columns, rows[1], ids, keep


def exact(kind: str, tensors: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return results(kind, *(x.to(dtype) for x in tensors[:4]), *tensors[4:])


def check_linear(step: Any) -> None:
    """The program has no array with the whole sequence in two axes."""
    for shape in re.findall(r"\[([\d,]+)\]", xs.program_text(step)):
        assert shape.split(",").count(str(LENGTH)) < 2, shape


def test_values_and_gradients_of_every_mask():
    tensors = inputs()
    placed = [x.to("jax") for x in tensors]
    for kind in KINDS:
        step = xs.compile(lambda *xs_, kind=kind: results(kind, *xs_))
        got = step(*placed)
        for result, want in zip(got, exact(kind, tensors), strict=True):
            torch.testing.assert_close(result.cpu().double(), want, rtol=1e-4, atol=1e-5, msg=kind)
        check_linear(step)


@pytest.mark.parametrize("spec", [P("x", "y"), P("x", None, "y")], ids=["batch, heads", "ring"])
def test_on_a_mesh(spec, mesh):
    """Split by batch and heads, and round a ring: masks are computed from their slices."""
    tensors = inputs(heads=8, key_heads=4)
    rows = [iso.shard(x, mesh, spec) for x in tensors[:4]]
    tokens = [iso.shard(x, mesh, P("x")) for x in tensors[4:]]
    for kind in ("packed", "bias"):
        step = xs.compile(lambda *xs_, kind=kind: results(kind, *xs_))
        got = step(*rows, *tokens)
        for result, want in zip(got, exact(kind, tensors), strict=True):
            torch.testing.assert_close(result.cpu().double(), want, rtol=1e-4, atol=1e-5, msg=kind)
        check_linear(step)


def test_halves_are_as_near_to_the_exact_result_as_cpu_torch():
    tensors = [x.bfloat16() if x.is_floating_point() else x for x in inputs()]
    step = xs.compile(lambda *xs_: results("padding", *xs_))
    got = step(*(x.to("jax") for x in tensors))
    expected = exact("padding", tensors), exact("padding", tensors, torch.bfloat16)
    for result, want, half in zip(got, *expected, strict=True):
        error, allowed = (float((x.cpu().double() - want).abs().max()) for x in (result, half))
        assert result.dtype == torch.bfloat16
        assert error <= 1.5 * allowed + torch.finfo(torch.bfloat16).eps * float(want.abs().max())


def test_dropout_and_a_mask_with_a_gradient():
    """A mean of ones is dropped and scaled; forward and backward drop the same."""
    q, k = draw(1, 1, LENGTH, 8).to("jax"), draw(1, 1, LENGTH, 8).to("jax")
    value = torch.ones(1, 1, LENGTH, 8, device="jax", requires_grad=True)
    out = attend(q, k, value, dropout_p=0.5)
    out.sum().backward()
    assert 0.97 < float(out.detach().mean()) < 1.03 and float(out.detach().std()) > 0.01
    assert float(value.grad.sum()) == pytest.approx(float(out.detach().sum()), rel=1e-4)
    bias = draw(LENGTH, LENGTH)
    grads = []
    for device in ("cpu", "jax"):
        leaf = bias.to(device, copy=True).requires_grad_()
        tensors = [x.to(device) for x in (q, k, q)]
        attend(*tensors, leaf).square().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-6)


def test_a_recomputed_layer_of_transformers_has_no_array_of_its_mask():
    """transformers computes one mask before its layers, which `checkpoint_module` runs again."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(64, (2, LENGTH), generator=GENERATOR)
    expected = model.double()(input_ids=ids, labels=ids).loss
    expected.backward()
    want = model.model.embed_tokens.weight.grad.clone()
    model.float().zero_grad()
    model.to("jax")
    for layer in model.model.layers:
        checkpoint_module(layer)

    @xs.compile
    def step(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    loss = step(ids.to("jax"))
    torch.testing.assert_close(loss.cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    grad = model.model.embed_tokens.weight.grad.cpu().double()
    torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-6)
    check_linear(step)
