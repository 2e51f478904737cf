"""Views and in-place operations act as on the CPU: random programs, then each operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import isoshard.torch_bridge as xs
from isoshard import P, make_mesh, shard

Op = Callable[[torch.Tensor], Any]


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same values, dtype, shape, strides and place in memory."""
    assert got.dtype == want.dtype
    assert tuple(got.shape) == tuple(want.shape)
    assert got.stride() == want.stride()
    assert got.storage_offset() == want.storage_offset()
    np.testing.assert_allclose(got.detach().cpu().numpy(), want.detach().numpy(), rtol=1e-5)


# --- Random programs -----------------------------------------------------------------------------


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


# --- One case per operator -----------------------------------------------------------------------

VIEWS: dict[str, Op] = {
    "view": lambda x: x.view(12),
    "view_same": lambda x: x.view(3, 4),
    "reshape": lambda x: x.reshape(2, 6),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "slice": lambda x: x[1:3],
    "slice_with_step": lambda x: x[:, ::2],
    "slice_both": lambda x: x[::2, 1:4:2],
    "select": lambda x: x[1],
    "select_column": lambda x: x.select(1, -1),
    "element": lambda x: x[2, 3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "chunk_uneven": lambda x: x.chunk(2, 0)[1],
    "split": lambda x: x.split(3, 1)[1],
    "split_sizes": lambda x: x.split([1, 2], 0)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[2],
    "hsplit": lambda x: x.hsplit(2)[0],
    "vsplit": lambda x: x.vsplit(3)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "iteration": lambda x: list(x)[1],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "squeeze_dim": lambda x: x[:1].squeeze(0),
    "diagonal": lambda x: x.diagonal(),
    "diagonal_above": lambda x: x.diagonal(1),
    "diagonal_of_view": lambda x: x.t().diagonal(-1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1), 1),
    "as_strided_steps": lambda x: x.as_strided((2, 2), (5, 3), 2),
    "as_strided_of_view": lambda x: x[1:].as_strided((2, 2), (2, 1)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "ravel": lambda x: x.ravel(),
    "view_as": lambda x: x.view_as(torch.empty(4, 3)),
    "movedim": lambda x: x.movedim(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "expand_same": lambda x: x.expand(3, 4),
    "ellipsis": lambda x: x[..., 1],
    "new_axis": lambda x: x[:, None, 1:],
    "view_of_view_of_view": lambda x: x.t()[1:].reshape(3, 3).t()[::2],
    "bitcast": lambda x: x.view(torch.int32),
    "bitcast_to_bytes": lambda x: x.view(torch.uint8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_the_base_and_its_siblings(name):
    want = torch.arange(12.0).reshape(3, 4)
    got = want.to("jax")
    sibling = got.view(-1)
    wants, gots = VIEWS[name](want), VIEWS[name](got)
    equal(gots, wants)
    wants.add_(1)
    gots.add_(1)
    equal(got, want)
    equal(gots, wants)
    equal(sibling, want.view(-1))


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_the_base_is_seen_through_a_view(name):
    want = torch.arange(12.0).reshape(3, 4)
    got = want.to("jax")
    wants, gots = VIEWS[name](want), VIEWS[name](got)
    xs.sync()
    want.mul_(3)
    got.mul_(3)
    equal(gots, wants)
    got[1, 2] = want[1, 2] = -7
    equal(gots, wants)


def test_complex_views_share_memory():
    want = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 4]], dtype=torch.complex64)
    got = want.to("jax")
    torch.view_as_real(want)[..., 1].mul_(2)
    torch.view_as_real(got)[..., 1].mul_(2)
    equal(got, want)
    got.real.zero_()
    want.real.zero_()
    equal(got, want)
    got.imag[0].add_(5)
    want.imag[0].add_(5)
    equal(got, want)


def test_pairs_of_floats_seen_as_complex_share_memory():
    want = torch.arange(8.0).reshape(4, 2)
    got = want.to("jax")
    torch.view_as_complex(want).mul_(1j)
    torch.view_as_complex(got).mul_(1j)
    equal(got, want)


def test_copy_broadcasts_and_keeps_the_shape():
    got = torch.zeros(3, 4, device="jax")
    got.copy_(torch.arange(4.0).to("jax"))
    equal(got, torch.arange(4.0).expand(3, 4).clone())
    got.copy_(torch.arange(3.0).reshape(3, 1))
    equal(got, torch.arange(3.0).reshape(3, 1).expand(3, 4).clone())
    got[1:].copy_(torch.tensor(9))
    assert got.tolist() == [[0.0] * 4, [9.0] * 4, [9.0] * 4]


def test_copy_converts_the_dtype():
    got = torch.zeros(3, dtype=torch.int64, device="jax")
    got.copy_(torch.tensor([1.7, -2.2, 3.0]).to("jax"))
    equal(got, torch.tensor([1, -2, 3]))


def test_copy_from_an_overlapping_view_reads_before_it_writes():
    got = torch.arange(6.0).to("jax")
    got[1:].copy_(got[:-1].clone())
    assert got.tolist() == [0, 0, 1, 2, 3, 4]


def test_slice_assignment_of_every_kind():
    def program(x: torch.Tensor) -> torch.Tensor:
        x[0] = 1
        x[:, 1] = torch.tensor([7.0, 8.0, 9.0]).to(x.device)
        x[1:, ::2] = x[:2, ::2] * 2
        x[x > 7.5] = -1
        x[[0, 2], [3, 0]] = 5
        x[torch.tensor([True, False, True]).to(x.device), 2] = 6
        x[...] += 1
        x[2][1:3][0] = 40
        return x

    start = torch.arange(12.0).reshape(3, 4)
    equal(program(start.to("jax")), program(start))


def test_a_copy_does_not_follow():
    base = torch.arange(6.0).to("jax")
    copies = [base.clone(), base + 0, base.contiguous().clone(), base.repeat(1), base[[0, 1]]]
    base.zero_()
    for made in copies:
        assert made.cpu().sum() > 0


def test_contiguous_is_the_same_memory_only_when_it_is_contiguous():
    base = torch.arange(6.0).to("jax").reshape(2, 3)
    base.contiguous().add_(1)
    base.t().contiguous().add_(100)
    assert base.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert base.is_contiguous() and not base.t().is_contiguous()


def test_reshape_of_a_transposed_tensor_copies():
    base = torch.arange(6.0).to("jax").reshape(2, 3)
    base.t().reshape(6).zero_()
    assert base.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(RuntimeError, match=r"view size is not compatible"):
        base.t().view(6)


def test_tensors_know_their_base():
    base = torch.arange(6.0, device="jax")
    view = base[2:]
    assert view._base is base and view._is_view()
    assert view.storage_offset() == 2 and view[1:].storage_offset() == 3


WRITES_TO_EXPANDED: dict[str, Op] = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(torch.ones(3, 4).to(x.device)),
}


@pytest.mark.parametrize("name", WRITES_TO_EXPANDED)
def test_a_write_to_an_expanded_tensor_is_refused_as_torch_does(name):
    for start in ((3, 1), (4,)):
        got = torch.ones(start).to("jax")
        for device in ("cpu", "jax"):
            with pytest.raises(RuntimeError, match=r"single memory location"):
                WRITES_TO_EXPANDED[name](torch.ones(start).to(device).expand(3, 4))
        with pytest.raises(RuntimeError, match=r"single memory location"):
            WRITES_TO_EXPANDED[name](got.expand(3, 4))
        equal(got, torch.ones(start))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_one_copy_in_an_expanded_tensor_can_be_written(row):
    """The element of a broadcast that no other element of the view shares."""
    want, got = torch.zeros(4), torch.zeros(4).to("jax")
    want.expand(3, 4)[row, 1:] = 5
    got.expand(3, 4)[row, 1:] = 5
    equal(got, want)
    wide_want, wide_got = want.reshape(4, 1).expand(4, 3), got.reshape(4, 1).expand(4, 3)
    wide_want[:, row].add_(1)
    wide_got[:, row].add_(1)
    equal(got, want)


OVERLAPPING: dict[str, Op] = {
    "first window": lambda x: x.unfold(0, 2, 1)[0],
    "second window": lambda x: x.unfold(0, 2, 1)[1],
    "one side of windows": lambda x: x.unfold(0, 2, 1)[..., 1],
    "split windows": lambda x: x.unfold(1, 3, 1).split(1, 1)[1],
    "row of overlapping strides": lambda x: x.as_strided((5, 2), (1, 1))[0],
    "column of overlapping strides": lambda x: x.as_strided((4, 3), (2, 1), 1)[:, 2],
    "part of an expanded part": lambda x: x[:, :1].expand(4, 6)[1:3, 4],
    "expanded twice": lambda x: x[0].expand(2, 6).unsqueeze(0).expand(3, 2, 6)[1, 1, 2:],
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_part_of_an_overlapping_view_can_be_written(name):
    want, got = torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(4, 6).to("jax")
    OVERLAPPING[name](want).add_(100)
    OVERLAPPING[name](got).add_(100)
    equal(got, want)
    equal(OVERLAPPING[name](got), OVERLAPPING[name](want))


def test_writes_by_mask_or_index_to_an_expanded_tensor_are_refused_too():
    """torch lets them pass with a warning that they are deprecated."""
    wide = torch.ones(3, 1, device="jax").expand(3, 4)
    with pytest.raises(RuntimeError, match=r"single memory location"):
        wide.masked_fill_(torch.ones(3, 4, dtype=torch.bool, device="jax"), 0)
    with pytest.raises(RuntimeError, match=r"single memory location"):
        wide[torch.tensor([0]).to("jax")] = 5.0


def test_as_strided_out_of_bounds_is_refused():
    with pytest.raises(RuntimeError, match=r"reaches element 14 of a storage of 12 elements"):
        torch.zeros(3, 4, device="jax").as_strided((3, 5), (5, 1))


def test_shapes_that_do_not_match_are_refused_and_nothing_is_written():
    got = torch.zeros(3, 4, device="jax")
    with pytest.raises(RuntimeError, match=r"(?i)size|shape|broadcast|expand"):
        got.add_(torch.ones(5, device="jax"))
    with pytest.raises(RuntimeError, match=r"(?i)size|shape|broadcast|expand"):
        got[0] = torch.ones(5, device="jax")
    with pytest.raises(RuntimeError, match=r"(?i)size|shape|broadcast|expand"):
        got.copy_(torch.ones(5))
    with pytest.raises(RuntimeError, match=r"(?i)can't be cast|not possible"):
        torch.zeros(3, dtype=torch.int32, device="jax").add_(1.5)
    with pytest.raises(IndexError, match=r"out of range|out of bounds"):
        got[3]
    assert not got.cpu().any()


# --- Autograd through views and writes -----------------------------------------------------------

GRADIENTS: dict[str, Op] = {
    "write_through_view": lambda x: _set(x * 1.0, lambda y: y.view(12)[2:7].mul_(3)),
    "write_through_t": lambda x: _set(x * 1.0, lambda y: y.t()[1].mul_(y.t()[2].clone())),
    "slice_assignment": lambda x: _set(x * 2.0, lambda y: y.__setitem__(1, y[0].clone() * 3)),
    "zero_a_row": lambda x: _set(x.sin(), lambda y: y[1].zero_()),
    "masked_fill": lambda x: _set(x * 1.0, lambda y: y.masked_fill_(y > 1, 0.0)),
    "copy_into": lambda x: _set(torch.zeros_like(x), lambda y: y[:, 1:].copy_(x[:, :3] ** 2)),
    "index_put": lambda x: _set(
        x * 1.0, lambda y: y.index_put_((torch.tensor([0, 2]).to(y.device),), x[1:] * 5)
    ),
    "unbind": lambda x: sum(row * (i + 1) for i, row in enumerate(x.unbind(1))),
    "chunk": lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1] ** 2,
    "diagonal": lambda x: x.diagonal() ** 2,
    "unfold": lambda x: x.unfold(1, 3, 1) ** 2,
    "expand": lambda x: x[:, :1].expand(3, 5) * torch.arange(5.0).to(x.device),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1) ** 2,
    "view_after_write": lambda x: _set(x * 2, lambda y: y.relu_()).view(2, 6)[:, ::2] * 2,
    "fresh_views_of_a_written_base": lambda x: _views_then_write(x),
}


def _set(y: torch.Tensor, write: Op) -> torch.Tensor:
    write(y)
    return y


def _views_then_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y[1:]
    y.mul_(y.detach().clone())
    return view * 3


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_views_and_writes_equal_the_cpu(name):
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "jax"):
        x = data.clone().to(device).requires_grad_()
        y = GRADIENTS[name](x)
        (y * y.detach().cos()).sum().backward()
        results.append((y.detach().cpu(), x.grad.cpu()))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_writing_to_a_leaf_that_requires_grad_is_refused():
    x = torch.ones(3, device="jax", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        x[0] = 2
    with torch.no_grad():
        x[0] = 2
    assert x.tolist() == [2, 1, 1]


def test_backward_notices_a_saved_tensor_that_was_overwritten():
    x = torch.ones(3, device="jax", requires_grad=True)
    y = x.exp()
    y.view(-1).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        y.sum().backward()


def test_detach_shares_memory_and_takes_no_gradient():
    x = torch.ones(3, device="jax", requires_grad=True)
    x.detach().mul_(4)
    assert x.tolist() == [4, 4, 4]
    assert not x.detach().requires_grad
