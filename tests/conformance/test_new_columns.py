"""The columns beside plain results: each passes what is right, and finds what is wrong."""

import warnings

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from isoshard.torch_bridge.engine.operators import out_arguments
from tests.conformance import entry, samples
from tests.conformance.columns import COLUMNS
from tests.conformance.database import entries
from tests.conformance.transformed import through_views

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

NEW = ("out=", "reference", "forward mode", "vmap", "views")


def statuses(name, columns, limit=1):
    cells = entry.run(entries()[name], columns, limit)
    return {column: (cell.status, cell.reason) for column, cell in cells.items()}


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("add", NEW),
        ("linalg.pinv", ["out="]),
        ("nn.functional.pixel_unshuffle", ["channels last"]),
        ("module.nn.Linear", ["forward", "backward", "forward mode", "errors"]),
        ("optim.Adam", ["forward", "errors"]),
        ("custom.NumpyMulCustomOp", ["forward", "backward"]),
        ("linalg.eigh", ["jax.vjp", "complex jax.vjp"]),
        ("nn.functional.dropout", ["jax.vjp"]),
    ],
)
def test_entries_of_the_databases(name, columns):
    columns = [column for column in columns if COLUMNS[column].applies(entries()[name])]
    assert statuses(name, columns) == dict.fromkeys(columns, ("pass", ""))


@pytest.mark.parametrize(
    ("wrong", "result"),
    [
        (lambda x: x * x.detach(), "result 1"),  # the gradient
        (lambda x: x.detach() * x.detach() + x * x.detach() * 2 - x.detach() ** 2 * 2, "result 2"),
    ],
)
def test_a_wrong_derivative_by_jax_is_found(wrong, result):
    def given(info, device, dtype, requires_grad, **_):
        made = torch.testing.make_tensor(3, dtype=dtype, device=device)
        yield SampleInput(made.requires_grad_(requires_grad))

    info = OpInfo(
        "squared",
        op=lambda x: x * x if x.device.type == "cpu" else wrong(x),
        dtypes=frozenset({torch.float64}),
        sample_inputs_func=given,
    )
    cell = entry.run(info, ["jax.vjp"])["jax.vjp"]
    assert cell.status == "wrong"
    assert result in cell.reason


def test_a_resize_without_its_warning_is_found(monkeypatch):
    monkeypatch.setattr(out_arguments, "warn_of_resizing", lambda target, result: None)
    assert statuses("sin", ["out="])["out="][0] == "wrong"


def test_a_larger_out_is_resized_with_a_warning():
    out = torch.empty(3, 2, device="jax")
    with pytest.warns(UserWarning, match=r"resized since it had shape \[3, 2\]"):
        torch.sin(torch.zeros(3, device="jax"), out=out)
    assert out.shape == (3,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.sin(torch.zeros(3, device="jax"), out=torch.empty(0, device="jax"))


def test_reference_inputs_have_extreme_values():
    chosen = samples.choose(entries()["sin"], torch.float32, 16, reference=True)
    values = [sample.input for sample in chosen]
    assert any(not value.isfinite().all() for value in values)
    assert any(not value.is_contiguous() for value in values)


def test_a_tensor_with_gaps_comes_to_the_device_with_its_gaps():
    given = torch.arange(12.0).reshape(3, 4)[:, ::2]
    sample = samples.moved(samples.SampleInput(given), entry.to_device)
    assert sample.input.stride() == (4, 2)
    assert torch.equal(sample.input.cpu(), given)


def test_inputs_become_views_of_new_leaves():
    given = torch.ones(3, requires_grad=True)
    leaves, sample = through_views(samples.SampleInput(given, args=(2,)))
    assert [leaf.shape for leaf in leaves] == [(3, 2)]
    assert sample.input._base is leaves[0]
    assert sample.args == (2,)
