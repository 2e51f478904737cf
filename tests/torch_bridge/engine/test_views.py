"""Views share memory and in-place operations write to it, operator by operator as on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs

Op = Callable[[torch.Tensor], Any]

# Each view and shape is a program of its own, on purpose; a slow machine would warn of them.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same values, dtype, shape, strides and place in memory."""
    assert got.dtype == want.dtype
    assert tuple(got.shape) == tuple(want.shape)
    assert got.stride() == want.stride()
    assert got.storage_offset() == want.storage_offset()
    np.testing.assert_allclose(got.detach().cpu().numpy(), want.detach().numpy(), rtol=1e-5)


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


ROWS, LAST = torch.tensor([0, 2]), torch.tensor([-1])
CORNERS = torch.tensor([[True, False, False, False], [False] * 4, [False, False, True, False]])
FILLS: dict[str, Op] = {
    "index_fill_ along the rows": lambda x: x.index_fill_(0, ROWS.to(x.device), 5.0),
    "index_fill_ along the columns": lambda x: x.index_fill_(1, LAST.to(x.device), 5.0),
    "index_fill_ of nothing": lambda x: x.index_fill_(1, LAST[:0].to(x.device), 5.0),
    "index_fill_ with a tensor": lambda x: x.index_fill_(0, LAST.to(x.device), x.new_tensor(5.0)),
    "masked_fill_": lambda x: x.masked_fill_(CORNERS.to(x.device), 5.0),
    "masked_fill_ of rows": lambda x: x.masked_fill_(CORNERS[:, :1].to(x.device), 5.0),
    "index_put_": lambda x: x.index_put_((LAST.to(x.device), ROWS.to(x.device)), x.new_ones(())),
    "a mask": lambda x: x.__setitem__(CORNERS.to(x.device), 5.0),
    "indices": lambda x: x.__setitem__(ROWS.to(x.device), 5.0),
}


@pytest.mark.parametrize("name", FILLS)
def test_one_number_by_mask_or_index_to_an_expanded_tensor(name):
    """torch lets it pass with a warning, and memory is written where any of its elements is."""
    for start in ((3, 1), (4,), ()):
        base = {device: torch.ones(start).to(device) for device in ("cpu", "jax")}
        for tensor in base.values():
            version = tensor._version
            with pytest.warns(UserWarning, match=r"on expanded tensors is deprecated"):
                FILLS[name](tensor.expand(3, 4))
            assert tensor._version == version + 1
        equal(base["jax"], base["cpu"])


REFUSED_ON_EXPANDED: dict[str, Op] = {
    "several numbers": lambda x: x.index_put_((ROWS.to(x.device),), x.new_ones(2, 4)),
    "index_add_": lambda x: x.index_add_(0, ROWS.to(x.device), x.new_ones(2, 4)),
    "index_copy_": lambda x: x.index_copy_(0, ROWS.to(x.device), x.new_ones(2, 4)),
    "accumulating": lambda x: x.index_put_((ROWS.to(x.device),), x.new_ones(()), accumulate=True),
}


@pytest.mark.parametrize("name", REFUSED_ON_EXPANDED)
def test_what_depends_on_the_order_of_writes_to_an_expanded_tensor_is_refused(name):
    with pytest.raises(RuntimeError, match=r"single memory location"):
        REFUSED_ON_EXPANDED[name](torch.ones(3, 1, device="jax").expand(3, 4))


def test_wrong_arguments_of_a_write_to_an_expanded_tensor_are_refused():
    for device in ("cpu", "jax"):
        base = torch.ones(3, 1).to(device)
        wide = base.expand(3, 4)
        with pytest.raises(RuntimeError, match=r"(?i)dtype|type"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide.index_put_((ROWS.to(device),), torch.tensor(1).to(device))
        with pytest.raises(IndexError, match="got 2"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide.index_fill_(2, ROWS.to(device), 2.0)
        equal(base, torch.ones(3, 1))


def test_negative_strides_are_refused_as_on_the_cpu():
    message = r"as_strided: Negative strides are not supported at the moment, got strides: \[-1\]"
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match=message):
            torch.ones(3).to(device).as_strided([2], [-1])
    with pytest.raises(RuntimeError, match=message.replace("as", "empty", 1)):
        torch.empty_strided([2], [-1], device="jax")


OTHER_KINDS = {
    "int32": lambda x: x.view(torch.int32).as_strided((2, 2), (5, 3), 2),
    "int32 by steps": lambda x: x.t().view(torch.int32).as_strided((3,), (2,)),
    "conj": lambda x: torch.complex(x, -x).conj().as_strided((2, 2), (5, 3), 2),
    "conj of conj": lambda x: torch.complex(x, -x).conj().conj()[1].as_strided((2,), (2,), 1),
    "neg": lambda x: torch._neg_view(x).as_strided((2, 2), (5, 3), 2),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_as_strided_of_what_reads_the_memory_in_another_way(name):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    want, got = OTHER_KINDS[name](x.clone()), OTHER_KINDS[name](x.to("jax"))
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want.resolve_conj().resolve_neg())


def test_a_write_through_as_strided_of_another_dtype():
    for device in ("cpu", "jax"):
        x = torch.ones(3, 4).to(device)
        x.view(torch.int32).as_strided((2,), (5,), 1).fill_(0)
        assert (x.cpu().flatten() == 0).nonzero().flatten().tolist() == [1, 6]


OTHER_WIDTHS = {
    "narrower": (torch.float32, torch.uint8),
    "wider": (torch.uint8, torch.int32),
    "bfloat16, with NaN around": (torch.int32, torch.bfloat16),
    "parts of complex numbers": (torch.complex64, torch.float32),
}


@pytest.mark.parametrize("case", OTHER_WIDTHS)
@pytest.mark.parametrize("turned", [False, True])
def test_as_strided_of_another_width(case, turned):
    memory, seen = OTHER_WIDTHS[case]
    numbers = torch.randint(-100, 100, (4, 8), generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "jax"):
        x = numbers.to(memory).to(device)
        if turned:  # memory in another order than the axes
            x = x.t().contiguous().t()
        rows = x.t() if turned else x
        view = torch.view_as_real(rows) if memory.is_complex else rows.view(seen)
        part = view.as_strided((2, 2), (3, 1), 1)
        before = part.cpu().clone()
        part.fill_(3)
        part[0].add_(2)
        assert part.stride() == (3, 1) and part.storage_offset() == 1
        results.append((before, part.cpu(), x.cpu()))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_as_strided_of_halves_of_64_bits():
    x = torch.arange(12).reshape(3, 4) * (2**32 + 1)
    parts = [it.view(torch.int32).as_strided((3, 2), (5, 1), 1) for it in (x, x.to("jax"))]
    assert torch.equal(parts[1].cpu(), parts[0])


def test_a_write_to_an_empty_view_of_another_width():
    for device in ("cpu", "jax"):
        x = torch.zeros(2, 0, 0, 2, dtype=torch.int16).to(device)
        x.view(torch.uint8)[:-3:3] = 4
        assert x.cpu().shape == (2, 0, 0, 2)


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


@pytest.mark.parametrize("cut", [slice(7, None, 3), slice(5, 7, 4), slice(1, None, 3)])
def test_a_slice_with_steps_of_a_split_axis(cut):
    whole = torch.arange(64.0).reshape(8, 8)
    got = xs.mark_sharding(whole.to("jax"), xs.Mesh(range(8), (4, 2), ("x", "y")), ("x", "y"))
    equal(got[cut].clone(), whole[cut].clone())
    equal(got[:, cut].clone(), whole[:, cut].clone())
