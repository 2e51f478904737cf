"""Reading by index: basic and advanced, by mask, along an axis."""

from __future__ import annotations

import torch

from tests.fuzz.builder import Builder, Unfit

from .views import slice_text
from .write import places


def _advanced(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    parts, count = [], b.integer(1, 4)
    for extent in t.shape[: b.integer(1, t.dim())]:
        kind = b.integer(0, 4)
        if kind < 2:
            parts.append(places(b, extent, count=count))
        elif kind == 2:
            parts.append(slice_text(b, extent))
        elif kind == 3:
            parts.append(str(b.integer(-extent, extent - 1)))
        else:
            parts.append(str([b.integer(0, extent - 1) for _ in range(count)]))
        if b.chance(10):
            parts.append("None")
    if b.chance(20):
        parts.append("...")
    b.bind(f"{x}[{', '.join(parts)}]")


def _mask(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and not t.is_complex())
    t = b.scope[x]
    b.bind(
        b.one(
            (
                f"{x}[{x} > 0]",
                f"{x}[{b.fresh(t.shape[:1], torch.bool)}]",
                f"torch.masked_select({x}, {b.fresh(t.shape, torch.bool)})",
                f"{x}.nonzero()",
                f"torch.unique({x})",
                f"{x}.argwhere()",
            )
        )
    )


def _along(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    d = b.integer(-t.dim(), t.dim() - 1)
    extent = t.shape[d]
    index = f"data({b.seed()}, {tuple(t.shape)}, torch.int64).to(device) % {extent}"
    b.bind(
        b.one(
            (
                f"{x}.index_select({d}, {places(b, extent, least=0)})",
                f"{x}.gather({d}, {index})",
                f"torch.take_along_dim({x}, {index}, {d})",
                f"{x}.take({places(b, t.numel())})",
            )
        )
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: torch's copy for `select_scatter` then shares it as well."""
    memory = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.arange(memory).as_strided(tensor.shape, tensor.stride())
    return places.unique().numel() < tensor.numel()


def _functional(b: Builder) -> None:
    """Writes that return a new tensor."""
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0 and not _overlaps(t))
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    extent = t.shape[d]
    part = (*t.shape[:d], 1, *t.shape[d + 1 :])
    row = (*t.shape[:d], *t.shape[d + 1 :])
    index = f"data({b.seed()}, {part}, torch.int64).to(device) % {extent}"
    b.bind(
        b.one(
            (
                f"{x}.scatter({d}, {index}, {b.fresh(part, t.dtype)})",
                f"{x}.index_add({d}, {places(b, extent, count=1)}, {b.fresh(part, t.dtype)})",
                f"{x}.select_scatter({b.fresh(row, t.dtype)}, {d}, {b.integer(0, extent - 1)})",
                f"{x}.slice_scatter({b.fresh(part, t.dtype)}, {d}, 0, 1)",
                f"{x}.index_fill({d}, {places(b, extent)}, {b.integer(0, 2)})",
                f"{x}.masked_fill({b.fresh(t.shape, torch.bool)}, {b.integer(0, 3)})",
            )
        )
    )


def _buckets(b: Builder) -> None:
    x = b.tensor(lambda t: not t.is_complex() and not bool(t.isnan().any()))
    if b.scope[x].dtype == torch.bool:
        raise Unfit
    right = b.one((True, False))
    b.bind(f"torch.bucketize({x}, torch.tensor([-1, 0, 2], device=device), right={right})")


OPERATIONS = (_advanced, _advanced, _advanced, _along, _functional, _mask, _buckets)
