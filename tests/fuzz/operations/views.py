"""Views: tensors that share memory with others."""

from __future__ import annotations

import torch

from tests.fuzz.builder import Builder, Unfit


def has_dims(least: int):
    """Fits tensors of at least this rank."""
    return lambda t: t.dim() >= least


def _simple(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    calls = ["detach()", "view_as({x})", "squeeze()", "flatten()", "{x}[...]", "data", "ravel()"]
    if t.dim() <= 2:
        calls += ["t()", "t()"]
    if t.dim() >= 2:
        calls += ["mT", "adjoint()"]
    call = b.one(calls)
    b.bind(call.format(x=x) if call.startswith("{x}[") else f"{x}.{call.format(x=x)}")


def _axis(b: Builder) -> None:
    x = b.tensor()
    d = b.dim(b.scope[x])
    b.bind(f"{x}.{b.one(('unsqueeze', 'squeeze'))}({d})")


def _two_axes(b: Builder) -> None:
    x = b.tensor(has_dims(1))
    t = b.scope[x]
    b.bind(f"{x}.{b.one(('transpose', 'movedim', 'swapaxes'))}({b.dim(t)}, {b.dim(t)})")


def _permute(b: Builder) -> None:
    x = b.tensor(has_dims(2))
    left = list(range(b.scope[x].dim()))
    order = []
    while left:
        order.append(left.pop(b.integer(0, len(left) - 1)))
    b.bind(f"{x}.permute({order})")


def factors(b: Builder, count: int) -> tuple[int, ...]:
    """A random shape with this many elements."""
    if count == 0:
        return (0, b.integer(1, 3))
    shape = []
    while count > 1 and len(shape) < 3:
        factor = b.one([n for n in range(1, count + 1) if count % n == 0])
        shape.append(factor)
        count //= factor
    return (*shape, count)


def _reshape(b: Builder) -> None:
    x = b.tensor()
    shape = factors(b, b.scope[x].numel())
    if b.chance(5):
        shape = (*shape, 2)
    b.bind(f"{x}.{b.one(('view', 'reshape'))}({shape})")


def _merge(b: Builder) -> None:
    x = b.tensor(has_dims(2))
    first = b.integer(0, b.scope[x].dim() - 2)
    b.bind(f"{x}.flatten({first}, {first + 1})")


def _unflatten(b: Builder) -> None:
    x = b.tensor(has_dims(1))
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    extent = t.shape[d]
    inner = b.one([n for n in range(1, extent + 1) if extent % n == 0] or [1])
    b.bind(f"{x}.unflatten({d}, (-1, {inner}))")


def _slice(b: Builder) -> None:
    x = b.tensor(has_dims(1))
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    b.bind(f"{x}[{':, ' * d}{slice_text(b, t.shape[d])}]")


def slice_text(b: Builder, extent: int) -> str:
    """A slice of an axis, with a step."""
    start = b.one(("", b.integer(-extent - 1, extent + 1)))
    stop = b.one(("", b.integer(-extent - 1, extent + 1)))
    step = b.one(("", ":2", ":3"))
    return f"{start}:{stop}{step}"


def _mixed(b: Builder) -> None:
    x = b.tensor(has_dims(2))
    t = b.scope[x]
    second = t.shape[1]
    index = b.integer(-second, max(second - 1, -second))
    parts = [slice_text(b, t.shape[0]), b.one(("", "None")), str(index), b.one(("", "..."))]
    b.bind(f"{x}[{', '.join(part for part in parts if part)}]")


def _select(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    d = b.integer(-t.dim(), t.dim() - 1)
    index = b.integer(-t.shape[d], t.shape[d] - 1)
    b.bind(f"{x}.select({d}, {index})" if b.chance(50) else f"{x}.unbind({d})[{index}]")


def _narrow(b: Builder) -> None:
    x = b.tensor(has_dims(1))
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    start = b.integer(0, t.shape[d])
    b.bind(f"{x}.narrow({d}, {start}, {b.integer(0, t.shape[d] - start)})")


def _pieces(b: Builder) -> None:
    x = b.tensor(has_dims(1))
    t = b.scope[x]
    d = b.integer(-t.dim(), t.dim() - 1)
    extent = t.shape[d]
    first = b.integer(0, extent)
    call = b.one(
        (
            f"chunk({b.integer(1, 3)}, {d})",
            f"split({b.integer(1, 3)}, {d})",
            f"split([{first}, {extent - first}], {d})",
            f"tensor_split({b.integer(1, 3)}, {d})",
        )
    )
    b.bind(f"{x}.{call}[{b.one((0, -1))}]")


def _expand(b: Builder) -> None:
    x = b.tensor()
    shape = [b.integer(1, 3) if n == 1 else b.one((n, n, -1)) for n in b.scope[x].shape]
    lead = b.one(([], [2]))
    b.bind(f"{x}.expand({[*lead, *shape]})")


def _diagonal(b: Builder) -> None:
    x = b.tensor(has_dims(2))
    t = b.scope[x]
    first = b.integer(0, t.dim() - 1)
    second = b.one([d for d in range(t.dim()) if d != first])
    b.bind(f"{x}.diagonal({b.integer(-1, 1)}, {first}, {second})")


def _unfold(b: Builder) -> None:
    x = b.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    t = b.scope[x]
    d = b.integer(0, t.dim() - 1)
    size = b.integer(1, t.shape[d])
    b.bind(f"{x}.unfold({d}, {size}, {b.integer(1, 3)})")


def _as_strided(b: Builder) -> None:
    x = b.tensor(lambda t: t.numel() > 0)
    t = b.scope[x]
    owner = t if t._base is None else t._base
    if owner.untyped_storage().nbytes() != owner.numel() * owner.element_size():
        raise Unfit  # a result (select_scatter) with the memory of what it was made from
    if t.requires_grad and t.numel() < owner.numel():
        raise Unfit  # outside its elements it has a gradient only once the memory was written to
    extent = t.untyped_storage().nbytes() // t.element_size()
    inner, outer = b.integer(1, 3), b.integer(1, 3)
    step = b.integer(1, 2)
    skip = inner * step + b.integer(0, 2)
    last = (inner - 1) * step + (outer - 1) * skip
    if last >= extent:
        inner = outer = 1
        last = 0
    size, stride = (outer, inner), (skip, step)
    if b.chance(50):
        size, stride = size[::-1], stride[::-1]
    b.bind(f"{x}.as_strided({size}, {stride}, {b.integer(0, extent - 1 - last)})")


_SAME_WIDTH = {
    torch.float64: ("int64",),
    torch.int64: ("float64",),
    torch.float32: ("int32",),
    torch.int32: ("float32",),
    torch.bfloat16: ("int16",),
    torch.int16: ("bfloat16", "uint8"),
    torch.uint8: ("int8",),
    torch.complex64: (),
}


def _bits(b: Builder) -> None:
    x = b.tensor(lambda t: bool(_SAME_WIDTH.get(t.dtype)) and t.dim() >= 1)
    name = b.one(_SAME_WIDTH[b.scope[x].dtype])
    t = b.scope[x].detach()
    floats = t if t.is_floating_point() else t.view(getattr(torch, name)) if "float" in name else t
    if not bool(floats.isfinite().all()):
        raise Unfit  # which of its bit patterns a NaN has is undefined
    b.bind(f"{x}.view(torch.{name})")


def _complex(b: Builder) -> None:
    x = b.tensor(lambda t: t.dtype == torch.complex64)
    b.bind(b.one((f"torch.view_as_real({x})", f"{x}.real", f"{x}.imag", f"{x}.conj()")))


def _change_itself(b: Builder) -> None:
    x = b.tensor(lambda t: not t.requires_grad)
    t = b.scope[x]
    calls = [f"unsqueeze_({b.dim(t)})", f"squeeze_({b.dim(t)})", "squeeze_()"]
    if t.dim() <= 2:
        calls.append("t_()")
    calls.append(f"transpose_({b.dim(t)}, {b.dim(t)})")
    b.add(f"{x}.{b.one(calls)}")


OPERATIONS = (
    _slice,
    _reshape,
    _select,
    _simple,
    _axis,
    _two_axes,
    _permute,
    _merge,
    _unflatten,
    _mixed,
    _narrow,
    _pieces,
    _expand,
    _diagonal,
    _unfold,
    _as_strided,
    _bits,
    _complex,
    _change_itself,
)
