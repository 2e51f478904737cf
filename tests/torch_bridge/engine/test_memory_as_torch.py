"""Memory, dtypes and numbers as torch has them, where a device of another kind is apt to differ."""

import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils import deterministic

import isoshard.torch_bridge as xs


def channels_last(device):
    x = torch.zeros(2, 3, 4, 5, device=device)
    return x.resize_(2, 3, 4, 5, memory_format=torch.channels_last).stride()


def shrunk_views(device):
    x = torch.arange(6.0, device=device)
    view = x[:2]
    x.resize_(2, 2)
    x[0, 0] = 9
    return view.clone(), x


def shrunk_and_grown(device):
    x = torch.arange(6.0, device=device)
    return x.resize_(2).clone(), x.resize_(6).clone(), x.resize_(0).shape, x.resize_(2, 3)


def turned(device):
    x = torch.arange(6.0, device=device).reshape(2, 3).t()
    x.resize_(2, 2)
    return x.clone(), x.stride()


def behind(device):
    x = torch.arange(6.0, device=device)[2:]
    return x.resize_(2, 2).clone(), x.storage_offset(), x.resize_(2, 4).flatten()[:4].clone()


def from_nothing(device):
    return torch.empty(0, device=device).resize_(2, 3).fill_(1)


def resized_as(device):
    like = torch.empty(1, 2, 3, 4, device=device).to(memory_format=torch.channels_last)
    x = torch.arange(24.0, device=device)
    return x.resize_as_(like, memory_format=torch.preserve_format).stride()


def bools_as_bytes(device):
    x = torch.tensor([True, False, True], device=device)
    view = x.view(torch.uint8)
    view[1] = 1
    return view.clone(), x, view.view(torch.bool).clone()


def complex_as_floats(device):
    x = torch.tensor([1 + 2j, 3 - 1j], device=device)
    x.view(torch.float32)[1] = 5
    return x, x.view(torch.float32).view(torch.complex64).clone()


def filled_by_a_number(device):
    return torch.ones(3, device=device).copy_(2.0)


def numbers_of_tensors(device):
    return torch.tensor([torch.ones((), device=device), torch.zeros((), device=device)])


def ctc_of_one_sequence(device):
    scores = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    lengths = torch.tensor(5, device=device), torch.tensor(2, device=device)
    labels = torch.tensor([1, 2], device=device)
    return F.ctc_loss(scores.to(device), labels, *lengths)


def copies_of_views(device):
    x = torch.arange(6.0, device=device, requires_grad=True)
    torch.slice_copy(x, 0, 1, 3).sum().backward()
    y = x.detach()
    parts = [*torch.split_copy(y, 4), *torch.unbind_copy(y.reshape(2, 3)), torch.t_copy(y[None])]
    parts += [torch.as_strided_copy(y, (2, 2), (1, 2)), torch.expand_copy(y[:1], (3,))]
    return x.grad, *parts, *(part.stride() for part in parts)


def drawn_with_out(device):
    return torch.bernoulli(torch.ones(4, device=device), out=torch.zeros(4, device=device).long())


def images(device, *shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def padded(device, mode, *shape):
    """torch's CPU kernels and its shape functions disagree on strides here, and below."""
    x = images(device, *shape).requires_grad_()
    out = F.pad(x, (1,) * 2 * (len(shape) - 2), mode=mode)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return out.detach(), grad, out.stride(), grad.stride()


def unpooled(device):
    out = F.max_unpool2d(*F.max_pool2d(images(device, 2, 3, 4, 6), 2, return_indices=True), 2)
    return out, out.stride()


def one_row(device):
    x = images("cpu", 1, 5, 1, 1).reshape(5).to(device).requires_grad_()
    loss = F.multi_margin_loss(x, torch.tensor(2, device=device), reduction="none")
    return loss.detach(), *torch.autograd.grad(loss, x)


CASES = (
    *(channels_last, shrunk_views, shrunk_and_grown, turned, behind, from_nothing, resized_as),
    *(bools_as_bytes, complex_as_floats, filled_by_a_number, numbers_of_tensors),
    *(ctc_of_one_sequence, copies_of_views, drawn_with_out, unpooled, one_row),
    lambda device: padded(device, "reflect", 2, 3, 4, 5),
    lambda device: padded(device, "replicate", 1, 3, 4, 5),
    lambda device: padded(device, "reflect", 2, 3, 4, 5, 6),
)


def test_as_on_the_cpu():
    wants, gots = ([case(device) for case in CASES] for device in ("cpu", "jax"))
    xs.sync()
    for case, want, got in zip(CASES, wants, gots, strict=True):
        want, got = (one if isinstance(one, tuple) else (one,) for one in (want, got))
        for one, other in zip(got, want, strict=True):
            if not isinstance(other, torch.Tensor):
                assert one == other, case
                continue
            torch.testing.assert_close(one.cpu(), other, msg=lambda t, case=case: f"{case}: {t}")


def add_products(device, out):
    a, b = (torch.ones(shape, device=device) for shape in ((2, 2), (1, 2, 2)))
    torch.addbmm(a, b, b, out=out)


def log_sigmoid(device, out):
    torch._C._nn.log_sigmoid(torch.ones(3, device=device), out=out)


@pytest.mark.parametrize("call", [add_products, log_sigmoid])
def test_an_out_that_grows_without_a_warning(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", "jax"):
            call(device, torch.ones(7, device=device))


@pytest.mark.parametrize("function", [torch.as_tensor, torch.asarray])
def test_as_tensor_shares_what_is_on_the_device_already(function):
    x = torch.zeros(3, device="jax")
    leaf = torch.zeros(3, device="jax", requires_grad=True)
    named = {"requires_grad": True} if function is torch.asarray else {}
    for device in ("jax", "jax:0", torch.device("jax"), None):
        given = {} if device is None else {"device": device}
        function(x, **given).add_(1)
        assert function(x, **given) is x and function(x, dtype=torch.float32, **given) is x
        assert function(x, dtype=torch.float16, **given).dtype == torch.float16
        assert function(leaf, **given, **named) is leaf
    assert x.tolist() == [4.0, 4.0, 4.0]
    with torch.device("jax"):
        assert function(x) is x and function([1.0]).device.type == "jax"
    with torch.device("meta"):
        assert function([1.0]).is_meta
    assert torch.asarray(x, copy=True) is not x and torch.asarray(x, copy=False) is x
    assert function(x, device="cpu").device.type == "cpu" and function([1, 2]).tolist() == [1, 2]


def test_the_default_dtype_counts_whenever_it_is_changed():
    whole = torch.ones(3, dtype=torch.int64, device="jax")
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
            torch.set_default_dtype(dtype)
            found = (whole / 2, whole * 1.5, torch.sin(whole), torch.arange(3.0, device="jax"))
            assert {x.dtype for x in found} == {dtype}
    finally:
        torch.set_default_dtype(torch.float32)


def test_exponential_numbers_are_never_zero():
    torch.manual_seed(17)  # the least uniform number is among them
    drawn = torch.empty(2**19, device="jax").exponential_()
    assert 0 < drawn.min().item() and drawn.max().item() < 88


def test_both_parts_of_complex_numbers_are_drawn():
    torch.manual_seed(0)
    drawn = torch.rand(64, dtype=torch.complex64, device="jax")
    within = torch.empty(64, dtype=torch.complex64, device="jax").uniform_(-3, 5)
    for x in (drawn.cpu(), within.cpu() / 8 + (3 + 3j) / 8):
        parts = torch.view_as_real(x)
        assert 0 <= parts.min() < 0.1 and 0.9 < parts.max() < 1
        assert (parts[:, 0] - parts[:, 1]).abs().max() > 0.5


# --- Places that are not there: they cannot raise in a compiled program --------------------------

READS = (
    lambda x, far: x[far],
    lambda x, far: x[-far - 1],
    lambda x, far: x.take(far),
    lambda x, far: x.gather(0, far),
    lambda x, far: x.index_select(0, far),
    lambda x, far: F.embedding(far, x[:, None])[:, 0],
    lambda x, far: torch.take_along_dim(x, far),
)


def test_what_is_read_of_no_place_is_nan_and_nothing_is_written():
    far = torch.tensor([0, 7], device="jax")
    x = torch.arange(1.0, 7, device="jax")
    found = [read(x, far) for read in READS]
    y = torch.zeros(3, device="jax")
    y[far] = 1.0
    xs.sync()
    for first, second in (one.tolist() for one in found):
        assert first in (1.0, 6.0) and second != second
    assert y.tolist() == [1.0, 0.0, 0.0]
    whole = torch.arange(6, dtype=torch.int32, device="jax")
    assert whole[far].tolist() == [0, torch.iinfo(torch.int32).min]


def test_values_for_another_number_of_places():
    """The error comes once, with a read; what is there afterwards is NaN."""
    mask = torch.tensor([1, 1, 0, 1, 1, 0], device="jax") > 0
    for values in (2, 3, 5):
        x = torch.zeros(6, device="jax")
        x[mask] = torch.arange(1.0, values + 1, device="jax")
        with pytest.raises(RuntimeError, match="shape mismatch"):
            x.tolist()
        x = x.cpu()
        assert x[~mask.cpu()].tolist() == [0.0, 0.0] and x[mask.cpu()].isnan().all()
    x = torch.zeros(4, device="jax")
    x.masked_scatter_(x == 0, torch.ones(2, device="jax"))
    with pytest.raises(RuntimeError, match="Number of elements of source"):
        x.tolist()
    x = x.cpu()
    assert x[:2].tolist() == [1.0, 1.0] and x[2:].isnan().all()


# --- torch's deterministic mode: what it fills new memory with -----------------------------------


@pytest.fixture
def fill(monkeypatch):
    """Deterministic mode; called with whether to fill memory."""
    torch.use_deterministic_algorithms(True)
    yield lambda value: monkeypatch.setattr(deterministic, "fill_uninitialized_memory", value)
    torch.use_deterministic_algorithms(False)


FACTORIES = (
    lambda dtype, device: torch.empty(2, 3, dtype=dtype, device=device),
    lambda dtype, device: torch.empty_like(torch.ones(2, dtype=dtype, device=device)),
    lambda dtype, device: torch.empty_strided((2, 3), (1, 2), dtype=dtype, device=device),
    lambda dtype, device: torch.empty_permuted((2, 3), (1, 0), dtype=dtype, device=device),
    lambda dtype, device: torch.ones(1, device=device).new_empty(2, dtype=dtype),
    lambda dtype, device: torch.ones(2, 3, dtype=dtype, device=device).resize_(4, 3),
)


def test_new_memory_is_filled_as_on_the_cpu(fill):
    fill(True)
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64)
    cases = [(make, dtype) for make in FACTORIES for dtype in dtypes]
    gots = [make(dtype, "jax") for make, dtype in cases]
    zeros = torch.zeros(3, device="jax"), torch.zeros_like(torch.ones(2, device="jax"))
    xs.sync()
    for got, (make, dtype) in zip(gots, cases, strict=True):
        want = make(dtype, "cpu")
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
        assert got.stride() == want.stride()
    assert not any(one.cpu().any() for one in zeros)


def test_it_is_zeros_where_nobody_asks_and_a_captured_step_sees_it(fill):
    step = xs.compile(lambda: torch.empty(3, device="jax"))
    for value in (True, True, False, False, True):
        fill(value)
        assert bool(step().isnan().all()) is value
    fill(False)
    assert torch.empty(3, device="jax").tolist() == [0, 0, 0]
    torch.use_deterministic_algorithms(False)
    assert torch.empty(3, device="jax").tolist() == [0, 0, 0]


def test_median_and_histogram_are_deterministic_here(fill):
    fill(True)
    x = torch.tensor([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]])
    values, places = x.to("jax").median(1)
    assert values.tolist() == [2, 5] and places.tolist() == [2, 2]
    assert x.to("jax").nanmedian(1)[0].tolist() == [2, 5]
    assert torch.histc(x.to("jax"), 5).tolist() == torch.histc(x, 5).tolist()
