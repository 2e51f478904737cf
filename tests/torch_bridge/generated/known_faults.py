"""Programs of `programs.py` that are wrong, or refused without need, each with the reason.

They are strict: one that is mended fails its test until its line here goes.
"""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard.torch_bridge as xs

from .programs import Program

CAPTURED = ("compile", "compile with repeat")
NEEDS_ITS_VALUE = ("copied to_jax and back", "full", "jax_function", "numbers", "to_jax and back")

VALUE = ("copied to_jax and back", "full", "jax_function", "numbers", "to_jax and back")

LOST = "a state that a captured step assigns and returns is not bound again by a replay"
ARGUMENT = "a captured method that assigns its argument keeps the argument of the first call"
NOT_KEPT = "a state that a captured step assigns and does not return is refused"
VALUE = "an array that leaves a captured step is refused"
GRAD = "dynamo reads .grad of the tensors of a torch_module, which warns"


def reason(program: Program, way: str) -> tuple[str, type[BaseException]] | None:
    """Why a program fails, and with what; None if it is right.

    Args:
        program: with a state, or with a verb.
        way: to run it.
    """
    first, second, *rest = program.traits
    if way == "torch.compile" and first == "torch_module" and torch.__version__ >= "2.13":
        return GRAD, torch._dynamo.exc.InternalTorchDynamoError
    if way not in CAPTURED:
        return None
    if rest:
        return None
    if first in NEEDS_ITS_VALUE and (first, second) != ("full", "held"):
        return VALUE, xs.CaptureError
    return None


def marked(program: Program, way: str) -> tuple[pytest.MarkDecorator, ...]:
    """The mark of a program that fails; none for others."""
    known = reason(program, way)
    return (pytest.mark.xfail(reason=known[0], raises=known[1]),) if known else ()


IGNORED = "JAX differentiates what was recorded: what torch leaves out of its backward is not"
MODE_OF_GRAD = "gradients are off, and nothing requires one, within a function that JAX calls"
RULE = "torch's rule for these rows is in its backward, which is not asked"
SUBGRADIENT = "JAX's derivative of the lowering is another one than torch's backward at this point"

DERIVATIVES = {
    IGNORED: (
        "v * v.detach()",
        "v * v.data",
        "v + (v.round() - v).detach()",
        "v / v.detach().abs().max()",
        "v * without(v)",
        "v * decorated(v)",
        "hooked(v * 2)",
        "v * frozen(v)",
        "v * v.clone().detach_()",
    ),
    MODE_OF_GRAD: (
        "v * (3 if torch.is_grad_enabled() else 2)",
        "v * (3 if v.requires_grad else 2)",
    ),
    RULE: (
        "F.embedding(torch.tensor([0, 2, 0]), v.view(3, 2), padding_idx=0)",
        "F.embedding(torch.tensor([0, 2, 0]), v.view(3, 2), scale_grad_by_freq=True)",
    ),
    SUBGRADIENT: (
        "torch.relu(v)",
        "F.relu6(v)",
        "F.hardtanh(v)",
        "F.hardswish(v)",
        "F.hardsigmoid(v)",
        "F.prelu(v, v[:1].detach())",
        "v.abs()",
        "v.abs() ** 0.5",
        "v.abs().sqrt()",
        "v.clamp(-1, 1)",
        "v.clamp(min=0)",
        "v.clamp(max=1)",
        "torch.log1p(v.abs())",
        "torch.fmax(v, w)",
        "torch.fmin(v, w)",
        "torch.copysign(v, w)",
        "torch.atan2(v, w)",
        "torch.xlogy(v, w.abs())",
        "F.l1_loss(v, w)",
        "(v - w).abs()",
        "torch.dist(v, w)",
        "F.cosine_similarity(v, w, dim=0)",
        "torch.cdist(v.view(3, 2), w.view(3, 2))",
        "v.abs() ** w",
        "v.norm()",
        "v.norm(1)",
        "v.norm(3)",
        "v.norm(float('inf'))",
        "v.view(3, 2).norm(dim=1)",
        "torch.linalg.vector_norm(v)",
        "F.normalize(v, dim=0)",
        "v.view(3, 2).max(dim=1).values",
        "v.view(3, 2).min(dim=0).values",
        "v.median()",
        "v.std()",
        "v.cummax(0).values",
        "v.topk(2).values",
        "v.kthvalue(3).values",
        "torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0, 1, 1, 2, 2]), v, 'prod')",
    ),
}
"""By reason: lines of `test_derivatives.py`."""

if jax.__version_info__ < (0, 12):
    DERIVATIVES[SUBGRADIENT] += ("torch.hypot(v, w)",)

INTEGERS_OF_64 = (torch.int64, torch.uint64)
FLOATS_OF_8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int16, torch.int32, torch.int64, *UNSIGNED)

CROSSINGS = {
    "integers are cut to 32 bits": (
        AssertionError,
        ("torch_function on the device",),
        INTEGERS_OF_64,
    ),
    "JAX's own: jnp.from_dlpack cuts to 32 bits what torch gives it, from the CPU too": (
        AssertionError,
        ("dlpack",),
        (*INTEGERS_OF_64, torch.float64, torch.complex128),
    ),
    "torch pickles these dtypes by a storage that the device lacks": (
        AttributeError,
        ("pickle",),
        (*UNSIGNED, *FLOATS_OF_8),
    ),
    "a program that moves the smallest float8_e5m2fnuz doubles it": (
        AssertionError,
        ("shard on the device",),
        (torch.float8_e5m2fnuz,) if jax.__version_info__ < (0, 11) else (),
    ),
}
"""By reason: the error, ways over and dtypes of `test_crossings.py`."""

SATURATES = not torch.tensor([600.0]).to(torch.float8_e4m3fn).float().isnan().item()
"""From torch 2.13 on; before, what is too large is NaN."""

CONVERSIONS = {
    "too large for float8_e4m3fn: NaN, where torch gives the largest": {
        (dtype, torch.float8_e4m3fn)
        for dtype in (
            *INTEGERS,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.complex64,
            torch.complex128,
        )
        if SATURATES
    },
}
"""By reason: pairs of dtypes."""
