"""In-place operations, also through views and on leaves under `no_grad`."""

from __future__ import annotations

import numpy as np
import torch

from tests.fuzz.builder import Builder, Unfit
from tests.fuzz.program import is_leaf

from .views import slice_text


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements share a place in memory: writing there is undefined."""
    if t.dim() == 0 or t.is_contiguous():
        return False
    places = [
        sum(i * s for i, s in zip(index, t.stride(), strict=True)) for index in np.ndindex(t.shape)
    ]
    return len(set(places)) < len(places)


def target(b: Builder, fits=None, *, expanded: bool = False) -> str:
    """A tensor whose places in memory differ; or an expanded one, which both refuse."""

    def good(t: torch.Tensor) -> bool:
        return (fits is None or fits(t)) and (
            not overlaps_itself(t) or (expanded and 0 in t.stride())
        )

    return b.tensor(good)


def source(b: Builder, x: str, *, same_dtype: bool = False, shape=None) -> str:
    """A tensor that may be broadcast to `x`, and whose numbers its dtype can hold."""
    t = b.scope[x]
    shape = tuple(t.shape) if shape is None else tuple(shape)

    def fits(other: torch.Tensor) -> bool:
        if same_dtype and other.dtype != t.dtype:
            return False
        if other.requires_grad and not (t.is_floating_point() or t.is_complex()):
            return False  # torch's CPU lets such integers require gradients, and fails later
        return _broadcasts(tuple(other.shape), shape) and convertible(other, t.dtype)

    if b.chance(40):
        known = b.tensors(fits)
        if known:
            name = b.one(known)
            return _apart(b, name, x)
    lead = b.integer(0, len(shape)) if b.chance(20) else 0
    shape = tuple(1 if b.chance(15) else n for n in shape[lead:])
    dtype = t.dtype if same_dtype or b.chance(60) else b.dtype()
    if dtype.is_complex and not t.dtype.is_complex:
        dtype = t.dtype
    made = b.fresh(shape, dtype)
    if not t.dtype.is_floating_point and not t.dtype.is_complex and dtype != t.dtype:
        made = f"{made}.abs().nan_to_num(1.0, 1.0, 1.0)"
    return made


def _apart(b: Builder, name: str, x: str) -> str:
    """A tensor that shares memory with the target is copied first; reading it is undefined."""
    t, other = b.scope[x], b.scope[name]
    shares = t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    same = (t.stride(), t.storage_offset(), t.shape) == (
        other.stride(),
        other.storage_offset(),
        other.shape,
    )
    return name if not shares or same else f"{name}.clone()"


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def convertible(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every number has a place in `dtype`: C++ leaves the others undefined."""
    t = t.detach()
    if t.is_complex():
        return dtype.is_complex
    if not t.is_floating_point() or dtype.is_floating_point or dtype.is_complex or not t.numel():
        return True
    if dtype == torch.bool:
        return True
    bounds = torch.iinfo(dtype)
    return bool(t.isfinite().all()) and bounds.min <= float(t.min()) <= float(t.max()) < bounds.max


def say(b: Builder, x: str, text: str) -> None:
    """Write the line, on leaves mostly under `no_grad`."""
    t = b.scope[x]
    quiet = t.requires_grad and is_leaf(t) is True and not b.chance(10)
    b.add(f"with torch.no_grad(): {text}" if quiet or b.chance(5) else text)


def _arithmetic(b: Builder) -> None:
    x = target(b, expanded=True)
    method = b.one(("add_", "mul_", "sub_", "div_", "copy_", "logical_and_", "eq_", "maximum"))
    if method == "maximum":
        say(b, x, f"torch.maximum({x}, {source(b, x, same_dtype=True)}, out={x})")
        return
    say(b, x, f"{x}.{method}({source(b, x)})")


def _augmented(b: Builder) -> None:
    x = target(b, expanded=True)
    operator = b.one(("+=", "-=", "*=", "/=", "//=", "%=", "&=", "|=", "**="))
    say(b, x, f"{x} {operator} {b.number()}")


def _numbers(b: Builder) -> None:
    x = target(b)
    number = b.number()
    call = b.one(
        (
            f"add_({number})",
            f"mul_({number})",
            f"sub_({number}, alpha=2)",
            f"pow_({b.integer(0, 3)})",
            f"clamp_({b.integer(-3, 0)}, {b.integer(0, 3)})",
            f"clamp_min_({b.integer(-3, 3)})",
            "zero_()",
            "neg_()",
            "abs_()",
            "relu_()",
            "sigmoid_()",
            "exp_()",
            "square_()",
            "sqrt_()",
            "floor_()",
            "logical_not_()",
            "tril_()",
            "triu_(1)",
            f"fill_diagonal_({b.integer(-2, 2)})",
        )
    )
    say(b, x, f"{x}.{call}")


def _fill(b: Builder) -> None:
    x = target(b)
    number = _own_number(b, b.scope[x])
    mask = f"{b.fresh(b.scope[x].shape, torch.bool)}"
    say(b, x, f"{x}.{b.one((f'fill_({number})', f'masked_fill_({mask}, {number})'))}")


def _own_number(b: Builder, t: torch.Tensor) -> str:
    if t.dtype == torch.uint8:
        return str(b.integer(0, 4))
    return b.number(floats=t.is_floating_point())


def _set_slice(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1)
    t = b.scope[x]
    text = slice_text(b, t.shape[0])
    if t.dim() >= 2 and b.chance(40):
        text += f", {slice_text(b, t.shape[1])}"
    if b.chance(10):
        text += ", ..."
    _assign(b, x, text)


def _set_number(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    _assign(b, x, f"{b.one(('', '..., '))}{b.integer(-1, min(t.shape[0], t.shape[-1]) - 1)}")


def _set_all(b: Builder) -> None:
    _assign(b, target(b), "...")


def _assign(b: Builder, x: str, where: str) -> None:
    t = b.scope[x]
    if b.chance(40):
        say(b, x, f"{x}[{where}] = {_own_number(b, t)}")
        return
    with torch.no_grad():
        shape = eval(f"x[{where}].shape", {"x": t})
    say(b, x, f"{x}[{where}] = {source(b, x, shape=shape)}")


def _set_mask(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1)
    t = b.scope[x]
    mask = b.one(
        (
            f"{x} > {b.integer(-1, 2)}" if not t.is_complex() else f"{x} != 0",
            b.fresh(t.shape, torch.bool),
            b.fresh(t.shape[:1], torch.bool),
        )
    )
    say(b, x, f"{x}[{mask}] = {_own_number(b, t)}")


def places(
    b: Builder,
    extent: int,
    *,
    count: int | None = None,
    repeat: bool = True,
    least: int | None = None,
) -> str:
    """An index tensor into an axis."""
    if extent == 0:
        raise Unfit
    count = b.integer(1, 4) if count is None else count
    if not repeat:
        count = min(count, extent)
        left = list(range(extent))
        chosen = [left.pop(b.integer(0, len(left) - 1)) for _ in range(count)]
    else:
        chosen = [b.integer(-extent if least is None else least, extent - 1) for _ in range(count)]
    return f"torch.tensor({chosen}, device=device)"


def _index_put(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1)
    t = b.scope[x]
    accumulate = b.chance(50)
    count = b.integer(1, 4)
    several = t.dim() >= 2 and b.chance(40)
    if several and not accumulate:
        one, other = (
            places(b, t.shape[0], count=1),
            places(b, t.shape[1], count=count, repeat=False),
        )
        index = f"({one}, {other})"
        count = min(count, t.shape[1])
    elif several:
        index = f"({places(b, t.shape[0], count=count)}, {places(b, t.shape[1], count=count)})"
    else:
        index = f"({places(b, t.shape[0], count=count, repeat=accumulate)},)"
        count = count if accumulate else min(count, t.shape[0])
    shape = (count, *t.shape[2 if several else 1 :])
    values = source(b, x, same_dtype=True, shape=shape)
    say(b, x, f"{x}.index_put_({index}, {values}, accumulate={accumulate})")


def _along(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1)
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    kind = b.one(("index_add_", "index_fill_", "index_copy_", "index_reduce_"))
    index = places(b, t.shape[d], repeat=kind == "index_add_")
    count = index.count(",")
    if kind == "index_fill_":
        say(b, x, f"{x}.index_fill_({d}, {index}, {_own_number(b, t)})")
        return
    values = b.fresh((*t.shape[:d], count, *t.shape[d + 1 :]), t.dtype)
    extra = ', "amax"' if kind == "index_reduce_" else ""
    say(b, x, f"{x}.{kind}({d}, {index}, {values}{extra})")


def _scatter(b: Builder) -> None:
    x = target(b, lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    length = t.shape[d]
    index = f"data({b.seed()}, {tuple(t.shape)}, torch.int64).to(device) % {length}"
    method = b.one(("scatter_add_", "scatter_reduce_", "scatter_"))
    if method == "scatter_":  # every place once: which of two wins is undefined
        shape = (*t.shape[:d], 1, *t.shape[d + 1 :])
        index = f"data({b.seed()}, {shape}, torch.int64).to(device) % {length}"
        values = b.one((b.fresh(shape, t.dtype), _own_number(b, t)))
        say(b, x, f"{x}.scatter_({d}, {index}, {values})")
        return
    extra = f', "{b.one(("sum", "amax", "amin", "prod", "mean"))}"' if "reduce" in method else ""
    values = b.fresh(t.shape, t.dtype)
    say(b, x, f"{x}.{method}({d}, {index}, {values}{extra})")


def _fused(b: Builder) -> None:
    x = target(b, lambda t: t.is_floating_point())
    t = b.scope[x]
    one, two = (source(b, x, same_dtype=True) for _ in range(2))
    call = b.one(
        (
            f"addcmul_({one}, {two}, value=0.5)",
            f"lerp_({one}, 0.25)",
            f"lerp_({one}, {two})",
            f"masked_scatter_({b.fresh(t.shape, torch.bool)}, {b.fresh(t.shape, t.dtype)})",
            f"copysign_({one})",
            f"set_({b.fresh(t.shape, t.dtype)})",
        )
    )
    say(b, x, f"{x}.{call}")


def _foreach(b: Builder) -> None:
    x, y = (target(b, lambda t: t.is_floating_point()) for _ in range(2))
    if b.scope[x].untyped_storage().data_ptr() == b.scope[y].untyped_storage().data_ptr():
        raise Unfit
    method = b.one(("_foreach_add_", "_foreach_mul_"))
    b.add(f"with torch.no_grad(): torch.{method}([{x}, {y}], {b.integer(1, 3)})")


OPERATIONS = (
    _set_slice,
    _arithmetic,
    _numbers,
    _augmented,
    _fill,
    _set_number,
    _set_all,
    _set_mask,
    _index_put,
    _along,
    _scatter,
    _fused,
    _foreach,
)
