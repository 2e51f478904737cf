"""Reductions and scans."""

from __future__ import annotations

import math

import torch

from tests.fuzz.builder import DTYPES, Builder

_REDUCTIONS = (
    "sum mean prod amax amin all any var std logsumexp nansum count_nonzero norm argmax argmin max "
    "min median nanmedian mode aminmax"
).split()
_ONE_AXIS = ("prod", "argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "aminmax")
_PAIRS = ("max", "min", "median", "nanmedian", "mode", "aminmax")
_NO_TIES = ("median", "nanmedian", "mode")
_WITH_DTYPE = ("sum", "mean", "prod", "nansum")


def ties(t: torch.Tensor) -> bool:
    """Whether numbers are equal, so that which of them is meant is undefined."""
    flat = t.detach().reshape(-1)
    return bool(flat.isnan().any()) or flat.unique().numel() < flat.numel()


def _product_depends_on_order(t: torch.Tensor) -> bool:
    """Whether a product overflows or vanishes on the way, and so may meet a 0 as infinity."""
    if not (t.is_floating_point() or t.is_complex()):
        return False
    size = t.detach().abs().double()
    powers = size[(size > 0) & size.isfinite()].log2()
    largest = math.log2(torch.finfo(t.dtype).max)
    return max(powers.clamp(min=0).sum(), -powers.clamp(max=0).sum()) > largest


def _reduce(b: Builder) -> None:
    name = b.one(_REDUCTIONS)
    fits = None
    if name == "prod":
        fits = lambda t: not _product_depends_on_order(t)  # noqa: E731
    if name in _NO_TIES:
        fits = lambda t: not t.is_complex() and not ties(t)  # noqa: E731
    x = b.tensor(fits)
    t = b.scope[x]
    options = []
    if name in _WITH_DTYPE and b.chance(25):
        dtypes = DTYPES if not t.is_floating_point() else (torch.float32, torch.bfloat16)
        options.append(f"dtype={b.one(dtypes)}")
    if b.chance(40):
        if name == "norm":
            options.insert(0, str(b.one((1, 2, 0, "float('inf')"))))
        b.bind(f"{x}.{name}({', '.join(options)})" if name != "aminmax" else f"{x}.aminmax().max")
        return
    if name in _ONE_AXIS:
        axes = str(b.dim(t))
    else:
        least = 1 if name == "logsumexp" else 0
        axes = str(tuple(sorted({b.dim(t) for _ in range(b.integer(least, 3))})))
    if b.chance(35):
        options.append("keepdim=True")
    if name in ("var", "std"):
        options.append(f"correction={b.integer(0, 2)}")
    if name == "norm":
        axes = f"{b.one((1, 2, 3))}, {axes}"
    if name == "aminmax":
        axes = f"dim={axes}"
    call = f"{x}.{name}({', '.join([axes, *options])})"
    b.bind(f"{call}[{b.integer(0, 1)}]" if name in _PAIRS else call)


def _scan(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1)
    d = b.dim(b.scope[x])
    name = b.one(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff"))
    if name in ("cummax", "cummin"):
        b.bind(f"{x}.{name}({d})[0]")
    elif name == "diff":
        b.bind(f"{x}.diff(dim={d})")
    else:
        b.bind(f"{x}.{name}({d})")


def _normalize(b: Builder) -> None:
    x = b.tensor(lambda t: t.is_floating_point() and t.dim() >= 1)
    t = b.scope[x]
    d = b.dim(t)
    # On the CPU the mean that comes with a variance is NaN or infinite, by the order of elements.
    with torch.no_grad():
        finite = int(t.isfinite().all())
    b.bind(
        b.one(
            (
                f"{x}.softmax({d})",
                f"F.log_softmax({x}, {d})",
                f"F.softmin({x}, {d})",
                f"F.normalize({x}, dim={d})",
                f"F.layer_norm({x}, {x}.shape[-1:])",
                f"F.rms_norm({x}, {x}.shape[-1:], eps=1e-3)",
                f"F.glu({x}, {d})",
                f"F.cosine_similarity({x}, {b.fresh(t.shape, t.dtype)}, dim={d})",
                f"torch.linalg.vector_norm({x}, dim={d})",
                f"{x}.softmax({d}, dtype=torch.float32)",
                f"torch.renorm({x}, 2, {d}, 2.0)",
                f"torch.var_mean({x}, {d})[{b.integer(0, finite)}]",
            )
        )
    )


OPERATIONS = (_reduce, _reduce, _reduce, _scan, _normalize)
