"""Memory, dtypes and numbers as torch has them, where a device of another kind is apt to differ."""

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401


def channels_last(device):
    x = torch.zeros(2, 3, 4, 5, device=device)
    return x.resize_(2, 3, 4, 5, memory_format=torch.channels_last).stride()


def shrunk_views(device):
    x = torch.arange(6.0, device=device)
    view = x[:2]
    x.resize_(2, 2)
    x[0, 0] = 9
    return view.tolist(), x.tolist()


def shrunk_and_grown(device):
    x = torch.arange(6.0, device=device)
    return (
        x.resize_(2).tolist(),
        x.resize_(6).tolist(),
        x.resize_(0).shape,
        x.resize_(2, 3).tolist(),
    )


def turned(device):
    x = torch.arange(6.0, device=device).reshape(2, 3).t()
    x.resize_(2, 2)
    return x.tolist(), x.stride()


def behind(device):
    x = torch.arange(6.0, device=device)[2:]
    return x.resize_(2, 2).tolist(), x.storage_offset(), x.resize_(2, 4).flatten()[:4].tolist()


def from_nothing(device):
    return torch.empty(0, device=device).resize_(2, 3).fill_(1).tolist()


def resized_as(device):
    like = torch.empty(1, 2, 3, 4, device=device).to(memory_format=torch.channels_last)
    x = torch.arange(24.0, device=device)
    return x.resize_as_(like, memory_format=torch.preserve_format).stride()


def bools_as_bytes(device):
    x = torch.tensor([True, False, True], device=device)
    view = x.view(torch.uint8)
    view[1] = 1
    return view.tolist(), x.tolist(), view.view(torch.bool).tolist()


def complex_as_floats(device):
    x = torch.tensor([1 + 2j, 3 - 1j], device=device)
    x.view(torch.float32)[1] = 5
    return x.tolist(), x.view(torch.float32).view(torch.complex64).tolist()


def filled_by_a_number(device):
    return torch.ones(3, device=device).copy_(2.0).tolist()


def numbers_of_tensors(device):
    losses = [torch.ones((), device=device), torch.zeros((), device=device)]
    made = torch.tensor(losses)
    return made.tolist(), made.device.type


def ctc_of_one_sequence(device):
    scores = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    lengths = torch.tensor(5, device=device), torch.tensor(2, device=device)
    labels = torch.tensor([1, 2], device=device)
    loss = torch.nn.functional.ctc_loss(scores.to(device), labels, *lengths)
    return round(loss.item(), 4)


def copies_of_views(device):
    x = torch.arange(6.0, device=device, requires_grad=True)
    torch.slice_copy(x, 0, 1, 3).sum().backward()
    y = x.detach()
    parts = [*torch.split_copy(y, 4), *torch.unbind_copy(y.reshape(2, 3)), torch.t_copy(y[None])]
    parts += [torch.as_strided_copy(y, (2, 2), (1, 2)), torch.expand_copy(y[:1], (3,))]
    return x.grad.tolist(), [(part.tolist(), part.stride()) for part in parts]


def drawn_with_out(device):
    return torch.bernoulli(torch.ones(4, device=device), out=torch.zeros(4, device=device).long())


@pytest.mark.parametrize(
    "case",
    [
        *(channels_last, shrunk_views, shrunk_and_grown, turned, behind, from_nothing, resized_as),
        *(bools_as_bytes, complex_as_floats, filled_by_a_number, numbers_of_tensors),
        *(ctc_of_one_sequence, copies_of_views),
        lambda device: drawn_with_out(device).tolist(),
    ],
)
def test_as_on_the_cpu(case):
    assert case("jax") == case("cpu")


class TestAsTensor:
    """`torch.as_tensor` and `asarray` share what is on the device already."""

    @pytest.mark.parametrize("function", [torch.as_tensor, torch.asarray])
    @pytest.mark.parametrize("device", ["jax", "jax:0", torch.device("jax"), None])
    def test_shares(self, function, device):
        x = torch.zeros(3, device="jax")
        given = {} if device is None else {"device": device}
        function(x, **given).add_(1)
        assert x.tolist() == [1.0, 1.0, 1.0] and function(x, **given) is x
        assert function(x, dtype=torch.float32, **given) is x
        assert function(x, dtype=torch.float16, **given).dtype == torch.float16
        leaf = torch.zeros(3, device="jax", requires_grad=True)
        named = {"requires_grad": True} if function is torch.asarray else {}
        assert function(leaf, **given, **named) is leaf

    def test_with_a_default_device(self):
        x = torch.zeros(3, device="jax")
        with torch.device("jax"):
            assert torch.as_tensor(x) is x and torch.asarray(x) is x
            assert torch.as_tensor([1.0]).device.type == "jax"
        with torch.device("meta"):
            assert torch.as_tensor([1.0]).is_meta
        assert torch.asarray(x, copy=True) is not x
        assert torch.asarray(x, copy=False) is x
        assert torch.as_tensor(x, device="cpu").device.type == "cpu"
        assert torch.as_tensor([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_default_dtype_counts_whenever_it_is_changed(dtype):
    whole = torch.ones(3, dtype=torch.int64, device="jax")

    def made():
        found = (whole / 2, whole * 1.5, torch.sin(whole), torch.arange(3.0, device="jax"))
        return {x.dtype for x in found}

    assert made() == {torch.float32}
    torch.set_default_dtype(dtype)
    try:
        assert made() == {dtype}
    finally:
        torch.set_default_dtype(torch.float32)
    assert made() == {torch.float32}


def test_exponential_numbers_are_never_zero():
    torch.manual_seed(0)
    assert torch.empty(2**24, device="jax").exponential_().min().item() > 0


def test_both_parts_of_complex_numbers_are_drawn():
    torch.manual_seed(0)
    for x in (
        torch.rand(64, dtype=torch.complex64, device="jax"),
        torch.empty(64, dtype=torch.complex64, device="jax").uniform_(-3, 5) / 8 + (3 + 3j) / 8,
    ):
        parts = torch.view_as_real(x)
        assert 0 <= parts.min() < 0.1 and 0.9 < parts.max() < 1
        assert (parts[:, 0] - parts[:, 1]).abs().max() > 0.5


class TestPlacesThatAreNotThere:
    """They cannot raise in a compiled program: what is read is NaN, and nothing is written."""

    far = staticmethod(lambda: torch.tensor([0, 7], device="jax"))

    @pytest.mark.parametrize(
        "read",
        [
            lambda x, far: x[far],
            lambda x, far: x[-far - 1],
            lambda x, far: x.take(far),
            lambda x, far: x.gather(0, far),
            lambda x, far: x.index_select(0, far),
            lambda x, far: torch.nn.functional.embedding(far, x[:, None])[:, 0],
            lambda x, far: torch.take_along_dim(x, far),
        ],
    )
    def test_read_as_nan(self, read):
        x = torch.arange(1.0, 7, device="jax")
        first, second = read(x, self.far()).tolist()
        assert first in (1.0, 6.0)
        assert second != second

    def test_of_integers_the_smallest(self):
        x = torch.arange(6, dtype=torch.int32, device="jax")
        assert x[self.far()].tolist() == [0, torch.iinfo(torch.int32).min]

    def test_nothing_is_written(self):
        x = torch.zeros(3, device="jax")
        x[self.far()] = 1.0
        assert x.tolist() == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("values", [2, 3, 5])
    def test_values_for_another_number_of_places(self, values):
        x = torch.zeros(6, device="jax")
        mask = torch.tensor([True, True, False, True, True, False], device="jax")
        x[mask] = torch.arange(1.0, values + 1, device="jax")
        assert x[~mask].tolist() == [0.0, 0.0]
        assert x[mask].isnan().all()

    def test_masked_scatter_of_too_few(self):
        x = torch.zeros(4, device="jax")
        x.masked_scatter_(x == 0, torch.ones(2, device="jax"))
        assert x[:2].tolist() == [1.0, 1.0] and x[2:].isnan().all()
