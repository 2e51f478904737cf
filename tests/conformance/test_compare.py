"""Results are equal within a tolerance, or as near to the wider type's as torch's own."""

import pytest
import torch

from tests.conformance.compare import difference, first_difference, is_as_good


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, float("nan"), float("inf")]),
        torch.tensor([[True, False]]),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 3),
        3,
        2.5,
        float("nan"),
        "word",
        None,
    ],
)
def test_a_value_equals_itself(value):
    assert difference(value, value) is None


@pytest.mark.parametrize(
    ("want", "got", "message"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), "1 of 2 elements differ"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "nan, torch gives 1.0"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"first at \(1,\): 3, torch gives 2"),
        (torch.ones(2), torch.ones(1, 2), r"shape \(1, 2\), torch gives \(2,\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float16), "float16, torch gives torch.float32"),
        (torch.ones(2), torch.ones(2).to_sparse(), "sparse_coo, torch gives torch.strided"),
        (torch.ones(1), 1.0, "float, torch gives a tensor"),
        (True, 1, "1, torch gives True"),
        (2.0, 2.1, "torch gives"),
    ],
)
def test_a_difference_is_described(want, got, message):
    with pytest.raises(AssertionError, match=message):
        assert difference(want, got) is None, difference(want, got)


def test_structures_must_have_as_many_results():
    ones = torch.ones(2)
    assert first_difference((ones, ones), [ones]) == "1 results, torch gives 2"
    assert first_difference((ones, ones), [ones, 2 * ones]).startswith("result 1: 2 of 2")


def test_the_wider_type_decides_where_rounding_does():
    truth = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    torchs = torch.tensor([1.0, 1.5e-3])  # cancellation: torch is off by half
    near, far = torch.tensor([1.0, 0.5e-3]), torch.tensor([1.0, 9e-2])
    assert first_difference(torchs, near) is not None
    assert first_difference(torchs, near, lambda: truth) is None
    assert first_difference(torchs, far, lambda: truth) is not None


def test_a_nan_of_torch_is_no_excuse_for_another_number():
    truth = torch.tensor([1.0], dtype=torch.float64)
    assert not is_as_good(torch.tensor([float("nan")]), torch.tensor([7.0]), truth)
    assert not is_as_good(torch.tensor([1.0]), torch.tensor([float("inf")]), truth)
