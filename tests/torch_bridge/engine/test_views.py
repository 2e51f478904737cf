"""Views share memory and in-place operations write to it, operator by operator as on the CPU."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.spelled_calls import calls, outcome

# Each view and shape is a program of its own, on purpose; a slow machine would warn of them.
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")


def same_place(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same dtype, shape, strides and place in memory."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert got.storage_offset() == want.storage_offset()


def compare(pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Compute all in one program, and compare."""
    xs.sync()
    for name, got, want in pairs:
        torch.testing.assert_close(
            got.detach().cpu(), want.detach(), equal_nan=True, msg=lambda t, n=name: f"{n}: {t}"
        )


def equal(got: torch.Tensor, want: torch.Tensor) -> None:
    same_place(got, want)
    compare([("", got, want)])


VIEWS = """
    x.view(12); x.t(); x.permute(1, 0); x[::2, 1:4:2]; x[2, 3]; x.narrow(1, 1, 2)
    x.chunk(2, 1)[1]; x.split(3, 1)[1]; x.tensor_split(3, 1)[2]; x.unbind(1)[2]; list(x)[1]
    x.unsqueeze(1); x[:, :1].squeeze(); x.t().diagonal(-1); x.unfold(1, 2, 2)
    x.as_strided((2, 2), (5, 3), 2); x[1:].as_strided((2, 2), (2, 1)); x.detach(); x.data
    x.unflatten(1, (2, 2)); x.expand(3, 4); x[:, None, 1:]
    x.t()[1:].reshape(3, 3).t()[::2]; x.view(torch.int32); x.view(torch.uint8)
"""


def test_a_write_through_a_view_reaches_the_base_and_its_siblings():
    pairs = []
    for view in calls(VIEWS):
        want = torch.arange(12.0).reshape(3, 4)
        got = want.to("jax")
        sibling = got.view(-1)
        wants, gots = outcome(view, "cpu", x=want), outcome(view, "jax", x=got)
        same_place(gots, wants)
        pairs.append((f"{view} before", gots.clone(), wants.clone()))
        wants.add_(1)
        gots.add_(1)
        pairs += [(view, got, want), (f"{view} after", gots.clone(), wants)]
        pairs.append((f"{view} sibling", sibling.clone(), want.view(-1)))
    compare(pairs)


def test_a_write_to_the_base_is_seen_through_a_view():
    made = []
    for view in calls(VIEWS):
        want = torch.arange(12.0).reshape(3, 4)
        got = want.to("jax")
        made.append((want, got, outcome(view, "cpu", x=want), outcome(view, "jax", x=got)))
    xs.sync()
    pairs = []
    for view, (want, got, wants, gots) in zip(calls(VIEWS), made, strict=True):
        want.mul_(3)
        got.mul_(3)
        pairs.append((view, gots.clone(), wants.clone()))
        got[1, 2] = want[1, 2] = -7
        pairs.append((f"{view}, an element", gots.clone(), wants.clone()))
    compare(pairs)


def test_complex_views_share_memory():
    found = []
    for device in ("cpu", "jax"):
        x = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 4]], dtype=torch.complex64).to(device)
        torch.view_as_real(x)[..., 1].mul_(2)
        x.real[1].zero_()
        x.imag[0].add_(5)
        pairs = torch.arange(8.0, device=device).reshape(4, 2)
        torch.view_as_complex(pairs).mul_(1j)
        found.append((x, pairs))
    for want, got in zip(*found, strict=True):
        equal(got, want)


def test_copy_broadcasts_and_converts():
    found = []
    for device in ("cpu", "jax"):
        x, y, z = (torch.zeros(3, 4, device=device) for _ in range(3))
        y.copy_(torch.arange(3.0, device=device).reshape(3, 1))
        z[1:].copy_(torch.tensor(9))
        whole = torch.zeros(3, dtype=torch.int64, device=device)
        whole.copy_(torch.tensor([1.7, -2.2, 3.0]).to(device))
        row = torch.arange(6.0, device=device)
        row[1:].copy_(row[:-1].clone())
        found.append((x.copy_(torch.arange(4.0, device=device)), y, z, whole, row))
    for want, got in zip(*found, strict=True):
        equal(got, want)


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
    base = torch.arange(6.0).to("jax").reshape(2, 3)
    copies = [base.clone(), base + 0, base.t().contiguous(), base.repeat(1, 1), base[[0, 1]]]
    copies.append(base.t().reshape(6))
    assert base.is_contiguous() and not base.t().is_contiguous()
    base.contiguous().zero_()
    copies[-1].add_(1)
    assert not base.cpu().any()
    for made in copies:
        assert made.cpu().sum() > 0
    with pytest.raises(RuntimeError, match=r"view size is not compatible"):
        base.t().view(6)


def test_tensors_know_their_base():
    base = torch.arange(6.0, device="jax")
    view = base[2:]
    assert view._base is base and view._is_view()
    assert view.storage_offset() == 2 and view[1:].storage_offset() == 3


def test_one_copy_in_an_expanded_tensor_can_be_written():
    """The element of a broadcast that no other element of the view shares."""
    pairs = []
    for row in range(3):
        want, got = torch.zeros(4), torch.zeros(4).to("jax")
        for x in (want, got):
            x.expand(3, 4)[row, 1:] = 5
            x.reshape(4, 1).expand(4, 3)[:, row].add_(1)
        pairs.append((f"row {row}", got, want))
    compare(pairs)


OVERLAPPING = """
    x.unfold(1, 3, 1).split(1, 1)[1]; x.as_strided((4, 3), (2, 1), 1)[:, 2]
    x[0].expand(2, 6).unsqueeze(0).expand(3, 2, 6)[1, 1, 2:]
"""


def test_a_part_of_an_overlapping_view_can_be_written():
    pairs = []
    for view in calls(OVERLAPPING):
        want, got = torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(4, 6).to("jax")
        seen = []
        for device, x in (("cpu", want), ("jax", got)):
            outcome(view, device, x=x).add_(100)
            seen.append(outcome(view, device, x=x))
        same_place(seen[1], seen[0])
        pairs += [(view, got, want), (f"{view}, seen", seen[1].clone(), seen[0])]
    compare(pairs)


CORNERS = torch.tensor([[True, False, False, False], [False] * 4, [False, False, True, False]])
FILLS = """
    x.index_fill_(0, ints(0, 2), 5.0); x.index_fill_(1, ints(-1), 5.0)
    x.index_fill_(1, ints(-1)[:0], 5.0); x.index_fill_(0, ints(-1), x.new_tensor(5.0))
    x.masked_fill_(corners, 5.0); x.masked_fill_(corners[:, :1], 5.0)
    x.index_put_((ints(-1), ints(0, 2)), x.new_ones(())); x.__setitem__(corners, 5.0)
    x.__setitem__(ints(0, 2), 5.0); x.__setitem__(ints(0, 2, 0), x.new_ones(3, 4).cumsum(1))
    x.index_put_((ints(0, 2),), x.new_ones(()), accumulate=True)
    x.index_put_((ints(2, 0, 1), ints(3, 3, 1)), x.new_ones(3).cumsum(0))
    x.index_put_((ints(2, 0, 2), ints(3, 3, 1)), x.new_ones(3).cumsum(0), accumulate=True)
    x.index_put_((corners,), x.new_ones(2).cumsum(0))
"""
REFUSED_ON_EXPANDED = """
    x.add_(1); x.copy_(ones(3, 4)); x.index_add_(0, ints(0, 2), x.new_ones(2, 4))
    x.index_copy_(0, ints(0, 2), x.new_ones(2, 4))
"""


def expanded(write: str, base: torch.Tensor) -> object:
    """What a write to a tensor expanded to rows of four gives, or raises."""
    device = base.device.type
    return outcome(write, device, x=base.expand(3, 4), corners=CORNERS.to(device))


def test_numbers_by_mask_or_index_to_an_expanded_tensor():
    """torch lets it pass with a warning, and memory is written where any of its elements is."""
    pairs = []
    for fill in calls(FILLS):
        for start in ((3, 1), (4,), ()):
            base = {device: torch.ones(start).to(device) for device in ("cpu", "jax")}
            for tensor in base.values():
                version = tensor._version
                with pytest.warns(UserWarning, match=r"on expanded tensors is deprecated"):
                    expanded(fill, tensor)
                assert tensor._version == version + 1
            pairs.append((f"{fill} of {start}", base["jax"], base["cpu"]))
    compare(pairs)


@pytest.mark.filterwarnings("ignore:.*on expanded tensors is deprecated")
def test_what_depends_on_the_order_of_writes_to_an_expanded_tensor_is_refused():
    for device in ("cpu", "jax"):
        base = torch.ones(3, 1, device=device)
        for write in calls(REFUSED_ON_EXPANDED):
            if device == "jax" or write in calls(REFUSED_ON_EXPANDED)[:2]:
                assert "single memory location" in str(expanded(write, base)), write
        error = expanded("x.index_put_((ints(0, 2),), torch.tensor(1, device=d))", base)
        assert isinstance(error, RuntimeError) and "type" in str(error)
        assert "got 2" in str(expanded("x.index_fill_(2, ints(0, 2), 2.0)", base))
        equal(base, torch.ones(3, 1))


def test_strides_out_of_bounds_are_refused():
    message = r"as_strided: Negative strides are not supported at the moment, got strides: \[-1\]"
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match=message):
            torch.ones(3).to(device).as_strided([2], [-1])
    with pytest.raises(RuntimeError, match=message.replace("as", "empty", 1)):
        torch.empty_strided([2], [-1], device="jax")
    with pytest.raises(RuntimeError, match=r"reaches element 14 of a storage of 12 elements"):
        torch.zeros(3, 4, device="jax").as_strided((3, 5), (5, 1))


OTHER_KINDS = """
    x.view(torch.int32).as_strided((2, 2), (5, 3), 2)
    x.t().view(torch.int32).as_strided((3,), (2,))
    torch.complex(x, -x).conj().as_strided((2, 2), (5, 3), 2)
    torch.complex(x, -x).conj().conj()[1].as_strided((2,), (2,), 1)
    torch._neg_view(x).as_strided((2, 2), (5, 3), 2)
"""


def test_as_strided_of_what_reads_the_memory_in_another_way():
    x, pairs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), []
    for view in calls(OTHER_KINDS):
        want, got = outcome(view, "cpu", x=x.clone()), outcome(view, "jax", x=x.to("jax"))
        assert got.stride() == want.stride(), view
        pairs.append((view, got.clone(), want.resolve_conj().resolve_neg()))
    compare(pairs)


def test_resolving_a_conjugate_copies_it_and_nothing_else():
    for device in ("cpu", "jax"):
        x = torch.tensor([1 + 2j, 3 - 1j], device=device)
        assert x.resolve_conj() is x
        lazy = x.conj()
        plain = lazy.resolve_conj()
        x[0] = 0
        assert plain.cpu().tolist() == [1 - 2j, 3 + 1j]
        assert lazy.cpu().tolist() == [0, 3 + 1j]


@pytest.mark.parametrize("offset", [0, 1, 4, None])
def test_as_strided_scatter_of_a_view_writes_to_the_memory_that_it_is_of(offset):
    def scattered(device):
        memory = torch.arange(8.0, device=device)
        view = memory.view(4, 2).select(1, 1)  # elements 1, 3, 5, 7
        values = torch.tensor([20.0, 30.0], device=device)
        return torch.as_strided_scatter(view, values, (2,), (2,), offset), memory

    for got, want in zip(scattered("jax"), scattered("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want)


def test_as_strided_scatter_of_views_of_another_kind():
    numbers = torch.tensor([1 + 2j, 3 - 4j, 5j, 6.0])
    values = torch.tensor([20 - 1j, 30 + 2j])

    def scattered(device):
        conjugate = numbers.to(device)[1:].conj()
        pairs = torch.view_as_real(numbers.to(device))[1:, 0]
        return [
            torch.as_strided_scatter(conjugate, values.to(device), (2,), (1,), 1).resolve_conj(),
            torch.as_strided_scatter(pairs, values.real.to(device), (2,), (2,), 4),
        ]

    for got, want in zip(scattered("jax"), scattered("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want)
    view = numbers.to("jax")[1:]
    for size, stride, text in (((3,), (1,), "src size"), ((2,), (0,), "more than one element")):
        with pytest.raises(RuntimeError, match=text):
            torch.as_strided_scatter(view, values.to("jax"), size, stride, 0)


def test_as_strided_of_another_dtype():
    for device in ("cpu", "jax"):
        x = torch.ones(3, 4).to(device)
        x.view(torch.int32).as_strided((2,), (5,), 1).fill_(0)
        assert (x.cpu().flatten() == 0).nonzero().flatten().tolist() == [1, 6]
        x = torch.zeros(2, 0, 0, 2, dtype=torch.int16).to(device)
        x.view(torch.uint8)[:-3:3] = 4
        assert x.cpu().shape == (2, 0, 0, 2)
    x = torch.arange(12).reshape(3, 4) * (2**32 + 1)
    parts = [it.view(torch.int32).as_strided((3, 2), (5, 1), 1) for it in (x, x.to("jax"))]
    assert torch.equal(parts[1].cpu(), parts[0])


OTHER_WIDTHS = {
    "narrower": (torch.float32, torch.uint8),
    "wider": (torch.uint8, torch.int32),
    "bfloat16, with NaN around": (torch.int32, torch.bfloat16),
}


def test_as_strided_of_another_width():
    numbers = torch.randint(-100, 100, (4, 8), generator=torch.Generator().manual_seed(0))
    results = {}
    for device in ("cpu", "jax"):
        results[device] = []
        for n, (memory, seen) in enumerate(OTHER_WIDTHS.values()):
            for turned in (n % 2 == 1,):
                x = numbers.to(memory).to(device)
                if turned:  # memory in another order than the axes
                    x = x.t().contiguous().t()
                rows = x.t() if turned else x
                part = rows.view(seen).as_strided((2, 2), (3, 1), 1)
                before = part.clone()
                part.fill_(3)
                part[0].add_(2)
                assert part.stride() == (3, 1) and part.storage_offset() == 1
                results[device] += [before, part.clone(), x]
    xs.sync()
    for want, got in zip(*results.values(), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


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


def test_a_slice_with_steps_of_a_split_axis():
    whole, pairs = torch.arange(64.0).reshape(8, 8), []
    got = xs.mark_sharding(whole.to("jax"), xs.Mesh(range(8), (4, 2), ("x", "y")), ("x", "y"))
    for cut in (slice(7, None, 3), slice(5, 7, 4), slice(1, None, 3)):
        pairs.append((f"rows {cut}", got[cut].clone(), whole[cut].clone()))
        pairs.append((f"columns {cut}", got[:, cut].clone(), whole[:, cut].clone()))
    compare(pairs)


def test_the_offset_of_a_view_counts_elements_of_its_own_dtype():
    def offsets(device):
        x = torch.arange(24, device=device).reshape(4, 6)
        parts = x.to(torch.complex64)[1:, 2:]
        halves = x.to(torch.int16)[2:]
        views = (
            parts.real,
            parts.imag,
            parts[1],
            halves.view(torch.uint8),
            halves.view(torch.int32),
        )
        return [view.storage_offset() for view in views]

    assert offsets("jax") == offsets("cpu")


OF_ANOTHER_DTYPE = {
    "x.view(uint8).unfold(0, 8, 2)[1]": torch.float32,
    "torch.view_as_real(x.unfold(0, 3, 1))[1]": torch.complex64,
    "torch.view_as_complex(x.unfold(0, 4, 2).unflatten(1, (2, 2)))[1]": torch.float32,
}


def test_a_write_to_overlapping_memory_of_another_dtype():
    pairs = []
    for view, dtype in OF_ANOTHER_DTYPE.items():
        values = torch.arange(12).to(dtype)
        want, got = values.clone(), values.to("jax")
        for device, x in (("cpu", want), ("jax", got)):
            part = outcome(view, device, x=x)
            part[...] = part.clone()
            if x is got:
                pairs.append((f"{view}, written as it is", x.clone(), values))
            part[..., :1] = part[..., 1:2].clone()
        pairs.append((view, got, want))
    compare(pairs)
