"""New tensors with the old numbers elsewhere: joining, padding, sorting."""

from __future__ import annotations

import torch

from tests.fuzz.builder import Builder, Unfit

from .reduce import ties
from .views import has_dims


def _join(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    others = [x]
    for _ in range(b.integer(1, 2)):
        alike = b.tensors(lambda o: o.shape == t.shape)
        others.append(b.one(alike) if b.chance(50) else b.fresh(t.shape))
    joined = ", ".join(others)
    if b.chance(50):
        b.bind(f"torch.cat([{joined}], {b.dim(t)})")
    else:
        b.bind(f"torch.stack([{joined}], {b.dim(t)})")


def _move(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    d = b.dim(t)
    calls = [
        f"{x}.roll({b.integer(-3, 3)}, {d})",
        f"{x}.flip({d})",
        f"{x}.roll({b.integer(-3, 3)})",
    ]
    if t.dim() >= 2:
        calls += [f"{x}.rot90({b.integer(0, 3)}, ({b.integer(0, 1)}, {b.dim(t)}))"]
        calls += [f"{x}.tril({b.integer(-1, 1)})", f"{x}.triu({b.integer(-1, 1)})", f"{x}.fliplr()"]
    b.bind(b.one(calls))


def _repeat(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    times = [b.integer(1, 2) for _ in range(t.dim() + b.integer(0, 1))]
    b.bind(
        b.one(
            (
                f"{x}.repeat({times})",
                f"{x}.tile({times[:1] or [2]})",
                f"{x}.repeat_interleave({b.integer(1, 3)}, {b.one((None, b.dim(t)))})",
            )
        )
    )


def _pad(b: Builder) -> None:
    mode = b.one(("constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        x = b.tensor(has_dims(1))
        amounts = [b.integer(-1, 2) for _ in range(2 * b.integer(1, b.scope[x].dim()))]
        b.bind(f"F.pad({x}, {amounts}, value={b.integer(0, 2)})")
        return
    x = b.tensor(lambda t: t.dim() in (2, 3, 4) and t.numel() > 0 and t.is_floating_point())
    count = b.integer(1, max(1, b.scope[x].dim() - 2))
    b.bind(f'F.pad({x}, {[b.integer(0, 2) for _ in range(2 * count)]}, mode="{mode}")')


def _sort(b: Builder) -> None:
    x = b.tensor(lambda t: not t.is_complex())
    t = b.scope[x]
    d, largest = b.dim(t), b.one((True, False))
    if not ties(t) and t.dim() >= 1 and b.chance(60):
        part = b.integer(0, 1)
        k = b.integer(1, max(1, min(t.shape)))
        b.bind(
            b.one(
                (
                    f"{x}.topk({k}, {d}, largest={largest})[{part}]",
                    f"{x}.kthvalue({k}, {d})[{part}]",
                    f"{x}.sort({d}, descending={largest})[{part}]",
                    f"{x}.argsort({d})",
                )
            )
        )
        return
    b.bind(
        b.one(
            (
                f"torch.sort({x}, dim={d}, descending={largest}, stable=True)[0]",
                f"torch.sort({x}, dim={d}, stable=True)[1]",
                # Which of equal elements gets a gradient is promised by a stable sort only.
                f"{x}.msort()" if not t.requires_grad else f"torch.sort({x}, stable=True)[0]",
            )
        )
    )


def _diagonals(b: Builder) -> None:
    x = b.tensor(lambda t: t.numel() <= 30)
    t = b.scope[x]
    calls = [f"torch.diag_embed({x}, {b.integer(-1, 1)})"] if t.dim() else []
    if t.dim() in (1, 2):
        calls += [f"torch.diag({x}, {b.integer(-1, 1)})"]
    if t.dim() >= 2:
        calls += [f"torch.diagonal_copy({x})", f"torch.block_diag({x}, {b.fresh((2, 2), t.dtype)})"]
    b.bind(b.one([call for call in calls if "block" not in call or t.dim() == 2]))


def _broadcast(b: Builder) -> None:
    x = b.tensor(lambda t: t.numel() <= 30)
    t = b.scope[x]
    b.bind(
        b.one(
            (
                f"torch.broadcast_tensors({x}, {b.fresh((3, *t.shape))})[{b.integer(0, 1)}]",
                f"torch.atleast_2d({x})",
                f"torch.atleast_3d({x})",
                f"torch.kron({x}, {b.fresh((2,), t.dtype)})",
                f"{x}.broadcast_to((2, *{x}.shape))",
                f"torch.hstack([{x}, {x}])",
                f"torch.vstack([{x}, {x}])",
                f"torch.dstack([{x}, {x}])",
            )
        )
    )


def _grid(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() == 1)
    y = b.fresh((3,), b.scope[x].dtype)
    part = b.integer(0, 1)
    b.bind(
        b.one(
            (
                f'torch.meshgrid({x}, {y}, indexing="ij")[{part}]',
                f"torch.cartesian_prod({x}, {y})",
                f"torch.vander({x}, 3)",
                f"torch.combinations({x})",
            )
        )
    )


def _one_hot(b: Builder) -> None:
    x = b.tensor(lambda t: t.dtype == torch.int64 and t.numel() <= 30 and bool((t >= 0).all()))
    if b.scope[x].numel() and int(b.scope[x].max()) > 6:
        raise Unfit
    b.bind(f"F.one_hot({x}, 7)")


OPERATIONS = (_join, _join, _move, _repeat, _pad, _sort, _diagonals, _broadcast, _grid, _one_hot)
