"""Products: matmul in all ranks, einsum, and what is built on them."""

from __future__ import annotations

import torch

from tests.fuzz.builder import Builder, Unfit

_EINSUM = ("ij,jk->ik", "ij,kj->ik", "ij,ij->i", "ii->i", "ii", "ij->ji", "bij,bjk->bik", "i,j->ij")
_EINSUM += ("ij->", "...i,...i->...", "bij,bkj->bik", "ij,j", "ijk,kl->ijl")


def _matmul(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    last = t.shape[-1]
    kind = b.integer(0, 3)
    shape = ((last,), (last, b.integer(1, 4)), (*t.shape[:-2], last, 2), (3, *([1] * 1), last, 2))[
        kind
    ]
    y = b.fresh(shape, t.dtype if not b.chance(5) else None)
    b.bind(
        b.one((f"{x} @ {y}", f"torch.matmul({x}, {y})", f"F.linear({x}, {y}.mT)"))
        if kind == 1
        else f"{x} @ {y}"
    )


def _named(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() == 2 and t.numel() > 0)
    n, m = b.scope[x].shape
    dtype = b.scope[x].dtype
    wide, vector = b.fresh((m, 3), dtype), b.fresh((m,), dtype)
    b.bind(
        b.one(
            (
                f"torch.mm({x}, {wide})",
                f"torch.mv({x}, {vector})",
                f"torch.addmm({b.fresh((n, 3), dtype)}, {x}, {wide}, beta=2, alpha=3)",
                f"torch.addmv({b.fresh((n,), dtype)}, {x}, {vector})",
                f"torch.outer({vector}, {x}[0])",
                f"torch.dot({vector}, {x}[0])",
                f"torch.tensordot({x}, {wide}, 1)",
                f"{x}.trace()",
                f"torch.addr({b.fresh((n, m), dtype)}, {b.fresh((n,), dtype)}, {vector})",
                f"torch.baddbmm({b.fresh((2, n, 3), dtype)}, {x}.expand(2, -1, -1), "
                f"{b.fresh((2, m, 3), dtype)})",
                f"torch.cdist({x}, {b.fresh((2, m), dtype)}, 1.0)",
                f"torch.linalg.multi_dot([{x}, {wide}, {b.fresh((3, 2), dtype)}])",
            )
        )
    )


def _einsum(b: Builder) -> None:
    equation = b.one(_EINSUM)
    sizes = {letter: b.one((2, 3, 4, 8)) for letter in "bijkl"}
    terms = equation.split("->")[0].replace("...", "b").split(",")
    known = b.tensors(lambda t: t.dim() == len(terms[0]) and t.numel() > 0)
    dtype = torch.float32
    operands = []
    if known and b.chance(70):
        name = b.one(known)
        for letter, extent in zip(terms[0], b.scope[name].shape, strict=True):
            sizes[letter] = extent
        if len(set(terms[0])) < len(terms[0]) and len(set(b.scope[name].shape)) > 1:
            raise Unfit
        operands, dtype, terms = [name], b.scope[name].dtype, terms[1:]
    operands += [b.fresh([sizes[letter] for letter in term], dtype) for term in terms]
    b.bind(f'torch.einsum("{equation}", {", ".join(operands)})')


def _attention(b: Builder) -> None:
    heads = (2, b.one((1, 2)), b.integer(1, 4), 4)
    q, k, v = (b.fresh(heads, torch.float32, special=False) for _ in range(3))
    extra = b.one(
        (
            "",
            ", is_causal=True",
            f", attn_mask={b.fresh(heads[2:3] * 2, torch.float32, special=False)}",
        )
    )
    b.bind(f"F.scaled_dot_product_attention({q}, {k}, {v}{extra})")


OPERATIONS = (_matmul, _matmul, _named, _einsum, _attention)
