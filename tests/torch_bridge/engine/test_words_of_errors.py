"""What torch refuses and warns of, in its words, where its order or its wording is relied on."""

from __future__ import annotations

import warnings

import pytest
import torch

BYTES = [1, 0, 1, 0]


def bytes_of(device):
    return torch.tensor(BYTES, dtype=torch.uint8, device=device)


def written(x, mask, values):
    x[mask] = values
    return x


def outcome(call, device):
    """The value of a call, or its error, and its warnings, as far as the words are torch's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call(device).tolist()
        except Exception as error:
            result = type(error), str(error).replace("typeFloat", "type Float")  # sic
    return result, [str(one.message).partition(" (Triggered")[0] for one in caught]


ones = torch.ones
CALLS = {
    "nonzero into floats": lambda d: torch.nonzero(ones(2, device=d), out=ones(2, 1, device=d)),
    "clamp by nothing": lambda d: ones(2, device=d).clamp(),
    "clamp by no tensors": lambda d: torch.clamp(ones(2, device=d), None, None),
    "clamp_ by nothing": lambda d: ones(2, device=d).clamp_(),
    "view at an odd offset": lambda d: ones(9, dtype=torch.uint8, device=d)[1:].view(torch.int32),
    "view at an odd offset and strided": lambda d: (
        ones(36, dtype=torch.uint8, device=d)[1:33].view(16, 2).t().view(torch.int16)
    ),
    "view of too few": lambda d: ones(4, 8, dtype=torch.uint8, device=d)[:, 1:].view(torch.int32),
    "complex view at an odd offset": lambda d: torch.view_as_complex(
        ones(9, device=d)[1:].view(4, 2)
    ),
    "index_put of another shape and dtype": lambda d: torch.zeros(3, device=d).index_put_(
        (torch.tensor([0, 1], device=d),), ones(3, dtype=torch.float64, device=d)
    ),
    "arange into fewer": lambda d: torch.arange(4, out=torch.zeros(2, device=d)),
    "arange into more": lambda d: torch.arange(4, out=torch.zeros(3, 3, device=d)),
    "arange into none": lambda d: torch.arange(4, out=torch.zeros(0, device=d)),
    "read at bytes": lambda d: torch.arange(4.0, device=d)[bytes_of(d)],
    "write at bytes": lambda d: written(
        torch.arange(4.0, device=d), bytes_of(d), torch.arange(2.0, device=d)
    ),
    "write at bytes and bytes": lambda d: ones(2, 2, device=d).index_put(
        (bytes_of(d)[:2], bytes_of(d)[:2]), torch.zeros(1, device=d)
    ),
    "write at bytes and bytes in place": lambda d: ones(2, 2, device=d).index_put_(
        (bytes_of(d)[:2], bytes_of(d)[:2]), torch.zeros(1, device=d)
    ),
    "an item of none": lambda d: torch.tensor(ones(0, device=d).item()),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name):
    assert outcome(CALLS[name], "jax") == outcome(CALLS[name], "cpu")


@pytest.mark.parametrize("end", ["to - 1", "from"])
def test_random_whole_numbers_beyond_float16(end):
    low, high = (0, 2**20) if end == "to - 1" else (-(2**20), 3)
    for device in ("cpu", "jax"):
        x = torch.zeros(2, dtype=torch.float16, device=device)
        with pytest.raises(RuntimeError, match=f"{end} is out of bounds for .*Half"):
            x.random_(low, high)


def test_more_axes_than_numpy_has():
    why = "a tensor of 65 axes cannot be on the jax device: NumPy's arrays.* have 64 at most"
    for make in (
        lambda: torch.ones([1] * 65).to("jax"),
        lambda: torch.ones([1] * 65, device="jax"),
        lambda: torch.ones([1] * 64, device="jax")[None],
    ):
        with pytest.raises(RuntimeError, match=why):
            make()
    assert torch.ones([1] * 64, device="jax").cpu().dim() == 64


@pytest.mark.parametrize("write", [torch.Tensor.put, torch.Tensor.put_])
def test_put_is_not_deterministic(write):
    arguments = torch.tensor([0]), torch.ones(1)
    try:
        for device in ("cpu", "jax"):
            index, values = (one.to(device) for one in arguments)
            torch.use_deterministic_algorithms(True)
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic impl"):
                write(torch.zeros(2, device=device), index, values)
            assert write(torch.zeros(2, device=device), index, values, True).tolist() == [1, 0]
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="put_ does not have a deterministic impl"):
                write(torch.zeros(2, device=device), index, values)
    finally:
        torch.use_deterministic_algorithms(False)
