"""`scaled_dot_product_attention` against CPU torch: values, gradients, strides, meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
B, H, L, S, E = 2, 4, 5, 6, 8
GENERATOR = torch.Generator()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def seeded():
    GENERATOR.manual_seed(0)


def heads_last(*shape: int) -> torch.Tensor:
    """(.., heads, length, width) whose memory is (.., length, heads, width), as layers make it."""
    return draw(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)


def keep(*shape: int) -> torch.Tensor:
    """A mask with a row in which nothing may be attended to."""
    mask = draw(*shape) > 0
    mask[..., 1, :] = False
    return mask


def usual() -> tuple[torch.Tensor, ...]:
    return draw(B, H, L, E), draw(B, H, S, E), draw(B, H, S, E)


def grouped() -> tuple[torch.Tensor, ...]:
    return draw(B, H, L, E), draw(B, 2, S, E), draw(B, 2, S, E)


def minus_infinity(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def lengths(queries: int, keys: int, batch: int = B) -> tuple[torch.Tensor, ...]:
    return draw(batch, H, queries, E), draw(batch, H, keys, E), draw(batch, H, keys, E)


def axes(*lead: int) -> tuple[torch.Tensor, ...]:
    return draw(*lead, L, E), draw(*lead, S, E), draw(*lead, S, E)


def last() -> tuple[torch.Tensor, ...]:
    return heads_last(B, H, L, E), heads_last(B, H, S, E), heads_last(B, H, S, E)


# What the tensors are, the options, and a mask.
CASES: dict[str, Any] = {
    "plain": lambda: (usual(), {}),
    "heads last in memory": lambda: (last(), {}),
    "causal, more keys": lambda: (usual(), {"is_causal": True}),
    "causal, fewer keys": lambda: (lengths(7, 3), {"is_causal": True}),
    "scale": lambda: (usual(), {"scale": 0.3}),
    "scale of zero": lambda: (usual(), {"scale": 0.0}),
    "bool mask of two axes": lambda: (usual(), {"attn_mask": keep(L, S)}),
    "float mask": lambda: (usual(), {"attn_mask": draw(B, H, L, S)}),
    "float mask that broadcasts": lambda: (usual(), {"attn_mask": draw(1, H, L, 1)}),
    "float mask of minus infinity": lambda: (usual(), {"attn_mask": minus_infinity(keep(L, S))}),
    "causal and a float mask": lambda: (usual(), {"is_causal": True, "attn_mask": draw(L, S)}),
    "grouped": lambda: (grouped(), {"enable_gqa": True, "attn_mask": keep(B, H, L, S)}),
    "grouped, three axes": lambda: (
        (draw(H, L, E), draw(2, S, E), draw(2, S, E)),
        {"enable_gqa": True, "attn_mask": draw(H, L, S)},
    ),
    "five axes": lambda: (axes(2, B, H), {"attn_mask": keep(B, 1, L, S)}),
    "another width of value": lambda: ((*usual()[:2], draw(B, H, S, 3)), {}),
    "one row, one column": lambda: (lengths(1, 1), {}),
}
# What torch's own products and softmax compute.
DECOMPOSED: dict[str, Any] = {
    "no keys": lambda: (lengths(L, 0), {}),
    "no batch": lambda: (lengths(L, S, 0), {}),
    "keys that broadcast": lambda: ((draw(B, H, L, E), draw(1, H, S, E), draw(1, 1, S, E)), {}),
    "value of other heads": lambda: (
        (draw(B, H, L, E), draw(B, 2, S, E), draw(B, 1, S, E)),
        {"enable_gqa": True},
    ),
}


def run(device: str, tensors, options, *, grad_mask: bool = False) -> list[torch.Tensor]:
    """The result and the gradients of everything that requires one."""
    given = [x.to(device).requires_grad_() for x in tensors]
    options = dict(options)
    if "attn_mask" in options:
        mask = options["attn_mask"] = options["attn_mask"].to(device)
        if grad_mask and mask.is_floating_point():
            given.append(mask.requires_grad_())
    out = attend(*given[:3], **options)
    weight = torch.linspace(-1, 2, out.numel()).reshape(out.shape).to(device, out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


def compare(got, want, **tolerances) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        torch.testing.assert_close(g.detach().cpu(), w.detach(), **tolerances)


def refused(tensors, options):
    """Whether CPU torch refuses a mask beside `is_causal` (2.15 does); then both must."""
    if not (options.get("is_causal") and options.get("attn_mask") is not None):
        return False
    try:
        run("cpu", tensors, options)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match="attn_mask should not be set"):
            run("jax", tensors, options)
        assert "attn_mask should not be set" in str(error)
        return True
    return False


def test_values_gradients_and_strides_are_those_of_the_cpu():
    """Of each case; and where a float mask has a gradient."""
    made = {name: case() for name, case in (CASES | DECOMPOSED).items()}
    runs = [(name, case, False) for name, case in made.items() if not refused(*case)]
    runs.append(("float mask that broadcasts", made["float mask that broadcasts"], True))
    found = [run("jax", *case, grad_mask=grad_mask) for _, case, grad_mask in runs]
    xs.sync()
    for got, (name, case, grad_mask) in zip(found, runs, strict=True):
        want = run("cpu", *case, grad_mask=grad_mask)
        compare(got, want, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
        if name in CASES:
            assert got[0].stride() == want[0].stride(), name


def test_in_double_precision(x64):
    found = []
    for name in ("scale", "causal and a float mask", "grouped"):
        tensors, options = CASES[name]()
        tensors = [x.double() for x in tensors]
        if not refused(tensors, options):
            found.append((run("jax", tensors, options), run("cpu", tensors, options)))
    for got, want in found:
        compare(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_near_to_the_exact_result_as_cpu_torch(dtype):
    found = []
    names = ("plain", "float mask", "bool mask of two axes", "grouped", "five axes")
    for name in names if dtype == torch.bfloat16 else names[:2]:
        tensors, options = CASES[name]()
        tensors = [x.to(dtype) for x in tensors]
        found.append((run("jax", tensors, options), tensors, options))
    for got, tensors, options in found:
        exact = run("cpu", [x.double() for x in tensors], options)
        want = run("cpu", tensors, options)
        for g, w, e in zip(got, want, exact, strict=True):
            assert g.dtype == w.dtype == dtype
            error, allowed = (float((x.cpu() - e).detach().abs().max()) for x in (g, w))
            largest = float(e.detach().abs().max())
            assert error <= 1.5 * allowed + torch.finfo(dtype).eps * largest


def test_the_flash_operator_refuses_dropout():
    x = draw(B, H, L, E).to("jax")
    with pytest.raises(NotImplementedError, match=r"drops no weights, .* dropout_p=0\.5"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)[0].cpu()
    xs.sync()


SPECS = {
    "both": (P("x", "y"), P("x", "y")),
    "grouped heads": (P("x", "y"), P("x", "y")),
    "both rows": (P(None, None, "x"), P(None, None, "y")),
    "width": (P(None, None, None, "y"), P(None, None, None, "y")),
}


@pytest.mark.parametrize("name", SPECS)
def test_on_a_mesh(name, mesh):
    """Split by batch or heads it needs no collective; otherwise it is right."""
    of_query, of_key = SPECS[name]
    heads = 4 if name == "grouped heads" else 8
    tensors = draw(4, 8, 8, E), draw(4, heads, 8, E), draw(4, heads, 8, E)
    options = {"is_causal": True, "enable_gqa": heads < 8}
    want = run("cpu", tensors, options)
    given = [
        iso.shard(x, mesh, spec).requires_grad_()
        for x, spec in zip(tensors, (of_query, of_key, of_key), strict=True)
    ]
    grad = iso.shard(torch.linspace(-1, 2, want[0].numel()).reshape(want[0].shape), mesh, of_query)

    @xs.compile
    def step(grad, *given):
        out = attend(*given, **options)
        return [out.detach(), *torch.autograd.grad(out, given, grad)]

    got = step(grad, *given)
    compare(got, want, rtol=1e-4, atol=1e-5)
    found = collectives.summarize(xs.program_text(step))
    if name in ("both", "grouped heads"):
        assert found == {}


def test_the_program_keeps_the_weights_once():
    """The gradient's weights are those of the forward operation: one `exp` of each."""
    tensors = [x.to("jax").requires_grad_() for x in usual()]
    of = lambda *given: attend(*given, is_causal=True).square().sum()  # noqa: E731
    step = xs.compile(lambda *given: torch.autograd.grad(of(*given), given))
    step(*tensors)
    assert xs.program_text(step).count(" exponential(") == 1
