"""Random programs of views, writes and reads act as on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import isoshard.torch_bridge as xs
from isoshard import P, make_mesh, shard
from tests.torch_bridge.test_views import equal

Op = Callable[[torch.Tensor], Any]


@dataclasses.dataclass
class Pair:
    """One tensor on both devices; a frozen one overlaps itself: writing to it is undefined."""

    want: torch.Tensor
    got: torch.Tensor
    frozen: bool = False


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements share a place in memory."""
    places = [
        sum(i * s for i, s in zip(index, t.stride(), strict=True)) for index in np.ndindex(t.shape)
    ]
    return len(set(places)) < len(places)


@st.composite
def slices(draw: Any, extent: int) -> slice:
    start = draw(st.integers(-extent - 1, extent + 1))
    stop = draw(st.integers(-extent - 1, extent + 1) | st.none())
    return slice(start, stop, draw(st.integers(1, 3)))


@st.composite
def shapes_of(draw: Any, count: int) -> tuple[int, ...]:
    """A random factorisation of a number of elements."""
    if count == 0:
        return (0, draw(st.integers(1, 3)))
    shape = []
    while count > 1 and len(shape) < 3:
        factor = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        shape.append(factor)
        count //= factor
    return (*shape, count)


@st.composite
def strided(draw: Any, t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Size, stride and offset of a window on the memory in which no two elements coincide."""
    extent = t.untyped_storage().nbytes() // t.element_size()
    inner, outer = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    step = draw(st.integers(1, 2))
    skip = inner * step + draw(st.integers(0, 2))
    last = (inner - 1) * step + (outer - 1) * skip
    if last >= extent:
        return (1, 1), (1, 1), 0
    size, stride = ((outer, inner), (skip, step))
    if draw(st.booleans()):
        size, stride = size[::-1], stride[::-1]
    return size, stride, draw(st.integers(0, extent - 1 - last))


def with_dims(t: torch.Tensor) -> list[str]:
    names = ["view", "reshape", "unsqueeze", "squeeze", "expand", "detach", "ellipsis", "flatten"]
    names += ["as_strided"] * (t.numel() > 0)
    if t.dim() >= 1:
        names += ["slice", "select", "narrow", "chunk", "split", "unbind", "unfold", "permute"]
        names += ["movedim", "sizes", "squeeze_dim"]
    if t.dim() >= 2:
        names += ["transpose", "diagonal", "mixed"]
    if t.dim() == 2:
        names += ["t"]
    if t.dim() >= 1 and any(extent == 0 for extent in t.shape):
        names = [n for n in names if n not in ("select", "unbind", "unfold", "mixed", "diagonal")]
    return names


@st.composite
def views(draw: Any, t: torch.Tensor) -> tuple[str, Op]:
    """A name, and a function to one view or several."""
    name = draw(st.sampled_from(with_dims(t)))
    dim = draw(st.integers(-t.dim(), t.dim() - 1)) if t.dim() else 0
    extent = t.shape[dim] if t.dim() else 1
    make = _SIMPLE.get(name)
    if make is not None:
        return name, make(draw, t, dim, extent)
    if name == "unfold":
        size = draw(st.integers(1, extent))
        step = draw(st.integers(1, 3))
        return f"unfold({dim}, {size}, {step})", lambda x: x.unfold(dim, size, step)
    where = draw(strided(t))
    return f"as_strided{where}", lambda x: x.as_strided(*where)


def _view(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    shape = draw(shapes_of(t.numel()))
    return lambda x: x.view(shape)


def _reshape(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    shape = draw(shapes_of(t.numel()))
    return lambda x: x.reshape(shape)


def _expand(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    shape = [draw(st.integers(1, 3)) if n == 1 else n for n in t.shape]
    lead = draw(st.sampled_from([[], [2]]))
    return lambda x: x.expand([*lead, *shape])


def _slice(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    where = (slice(None),) * (dim % t.dim()) + (draw(slices(extent)),)
    return lambda x: x[where]


def _mixed(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    where = (draw(slices(t.shape[0])), None, draw(st.integers(-t.shape[1], t.shape[1] - 1)), ...)
    return lambda x: x[where]


def _narrow(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    start = draw(st.integers(0, extent))
    length = draw(st.integers(0, extent - start))
    return lambda x: x.narrow(dim, start, length)


def _sizes(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    first = draw(st.integers(0, extent))
    return lambda x: x.split([first, extent - first], dim)


def _select(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    index = draw(st.integers(-extent, extent - 1))
    return lambda x: x.select(dim, index)


def _permute(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    order = draw(st.permutations(range(t.dim())))
    return lambda x: x.permute(order)


def _two_dims(method: str) -> Any:
    def make(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
        other = draw(st.integers(-t.dim(), t.dim() - 1))
        return lambda x: getattr(x, method)(dim, other)

    return make


def _diagonal(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
    first, second = draw(st.permutations(range(t.dim())))[:2]
    offset = draw(st.integers(-1, 1))
    return lambda x: x.diagonal(offset, first, second)


def _number(method: str, low: int, high: int) -> Any:
    def make(draw: Any, t: torch.Tensor, dim: int, extent: int) -> Op:
        number = draw(st.integers(low, high))
        return lambda x: getattr(x, method)(number, dim)

    return make


def _plain(function: Any) -> Any:
    return lambda draw, t, dim, extent: lambda x: function(x, dim)


_SIMPLE = {
    "view": _view,
    "reshape": _reshape,
    "expand": _expand,
    "slice": _slice,
    "mixed": _mixed,
    "narrow": _narrow,
    "sizes": _sizes,
    "select": _select,
    "permute": _permute,
    "transpose": _two_dims("transpose"),
    "movedim": _two_dims("movedim"),
    "diagonal": _diagonal,
    "chunk": _number("chunk", 1, 3),
    "split": _number("split", 1, 3),
    "unbind": _plain(lambda x, dim: x.unbind(dim)),
    "unsqueeze": _plain(lambda x, dim: x.unsqueeze(dim)),
    "squeeze": _plain(lambda x, dim: x.squeeze()),
    "squeeze_dim": _plain(lambda x, dim: x.squeeze(dim)),
    "flatten": _plain(lambda x, dim: x.flatten()),
    "detach": _plain(lambda x, dim: x.detach()),
    "ellipsis": _plain(lambda x, dim: x[...]),
    "t": _plain(lambda x, dim: x.t()),
}

_WRITES = ("add_", "mul_", "sub_", "zero_", "fill_", "clamp_", "relu_", "copy_", "copy_row")
_WRITES += ("masked_fill_", "index_put_", "setitem", "setitem_number", "iadd")


@st.composite
def writes(draw: Any, t: torch.Tensor) -> tuple[str, Op]:
    """A name and an in-place operation; operands are made on the tensor's device."""
    name = draw(st.sampled_from(_WRITES))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    data = torch.from_numpy(rng.integers(-3, 4, tuple(t.shape))).to(t.dtype)
    number = float(rng.integers(-2, 3))
    if name in ("add_", "mul_", "sub_", "copy_"):
        return name, lambda x: getattr(x, name)(data.to(x.device))
    if name in ("zero_", "relu_"):
        return name, lambda x: getattr(x, name)()
    if name == "fill_":
        return name, lambda x: x.fill_(number)
    if name == "clamp_":
        return name, lambda x: x.clamp_(-2, 2)
    if name == "copy_row":
        row = data.reshape(-1)[:1].reshape((1,) * min(t.dim(), 1)) if t.numel() else data
        return name, lambda x: x.copy_(row.to(x.device))
    if name == "masked_fill_":
        return name, lambda x: x.masked_fill_((data > 0).to(x.device), number)
    if name == "iadd":
        return name, lambda x: x.__iadd__(2)
    if t.dim() == 0 or t.shape[0] == 0:
        return "fill_", lambda x: x.fill_(number)
    rows = torch.from_numpy(rng.permutation(t.shape[0])[: max(1, t.shape[0] // 2)])
    if name == "index_put_":
        accumulate = bool(seed % 2)
        return name, lambda x: x.index_put_(
            (rows.to(x.device),), data[rows].to(x.device), accumulate=accumulate
        )
    where = draw(slices(t.shape[0]))
    if name == "setitem":
        return f"x[{where}] = data", lambda x: x.__setitem__(where, data[where].to(x.device))
    return f"x[{where}] = {number}", lambda x: x.__setitem__(where, number)


def outcome(op: Op, t: torch.Tensor) -> Any:
    try:
        return op(t)
    except (RuntimeError, IndexError) as error:
        return type(error)


def step(data: st.DataObject, live: list[Pair]) -> None:
    """Do one thing to both devices' tensors."""
    pair = live[data.draw(st.integers(0, len(live) - 1))]
    kind = data.draw(st.sampled_from(["view", "view", "write", "write", "read", "sync", "clone"]))
    if kind == "sync":
        xs.sync()
    elif kind == "read":
        equal(pair.got, pair.want)
    elif kind == "clone":
        live.append(Pair(pair.want.clone(), pair.got.clone()))
    elif kind == "view":
        name, op = data.draw(views(pair.want))
        note(f"{tuple(pair.want.shape)} -> {name}")
        want, got = outcome(op, pair.want), outcome(op, pair.got)
        if isinstance(want, type):
            assert got is want, f"CPU raises {want}, jax gives {got}"
            return
        many = isinstance(want, tuple | list)
        wants, gots = (want, got) if many else ([want], [got])
        assert len(wants) == len(gots)
        fresh = [Pair(w, g, overlaps_itself(w)) for w, g in zip(wants, gots, strict=True)]
        live.extend(fresh[:3])
    elif not pair.frozen:
        name, op = data.draw(writes(pair.want))
        note(f"{tuple(pair.want.shape)} <- {name}")
        want, got = outcome(op, pair.want), outcome(op, pair.got)
        assert isinstance(want, type) == isinstance(got, type), f"CPU {want}, jax {got}"


PROGRAMS = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def run(data: st.DataObject, want: torch.Tensor, got: torch.Tensor, steps: int) -> None:
    live = [Pair(want, got)]
    for _ in range(steps):
        step(data, live)
    for pair in live:
        equal(pair.got, pair.want)


@PROGRAMS
@given(
    st.data(),
    st.sampled_from([(4, 6), (2, 3, 4), (12,), (2, 2, 3, 2), (1, 4, 1)]),
    st.sampled_from([torch.float32, torch.int64]),
    st.integers(4, 10),
)
def test_random_programs_of_views_and_writes(data, shape, dtype, steps):
    want = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    run(data, want, want.to("jax"), steps)


@settings(PROGRAMS, max_examples=15)
@given(st.data(), st.sampled_from([P("x", "y"), P(None, "y"), P(("x", "y"), None)]))
def test_random_programs_on_a_mesh(data, spec):
    want = torch.arange(64.0).reshape(8, 8)
    got = shard(want.clone(), make_mesh((2, 4), ("x", "y")), spec)
    run(data, want, got, 4)


@settings(PROGRAMS, max_examples=15)
@given(st.data(), st.integers(1, 4))
def test_random_programs_on_a_transposed_base(data, steps):
    """`clone` keeps torch's memory order, which `view` and `as_strided` see."""
    want = torch.arange(24.0).reshape(4, 6).t().clone()
    run(data, want, torch.arange(24.0).to("jax").reshape(4, 6).t().clone(), steps)
