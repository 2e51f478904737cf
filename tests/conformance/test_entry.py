"""One entry of the database: what is right passes, what is wrong is found and named."""

import re

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from isoshard.torch_bridge import register_lowering
from tests.conformance import entry
from tests.conformance import samples as samples_module
from tests.conformance.database import entries

LIBRARY = torch.library.Library("conformance_test", "DEF")
COUNT = iter(range(1000))


def samples(info, device, dtype, requires_grad, **_):
    for shape in ((8,), (3, 4), ()):
        made = torch.testing.make_tensor(shape, dtype=dtype, device=device, low=1, high=9)
        yield SampleInput(made.requires_grad_(requires_grad))


def an_entry(cpu, jax=None, **options):
    """An operator of its own, computed by `cpu` there and by `jax` (None: not at all) here."""
    name = f"op{next(COUNT)}"
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, lambda x: torch.empty_like(x), "Meta")
    if jax is not None:
        register_lowering(f"conformance_test::{name}", jax)
    return OpInfo(
        name,
        op=getattr(torch.ops.conformance_test, name).default,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.int64}),
        sample_inputs_func=options.pop("sample_inputs_func", samples),
        supports_out=False,
        supports_autograd=False,
        **options,
    )


def test_a_right_lowering_passes_on_every_layout():
    info = an_entry(lambda x: x * 2, lambda x: x * 2)
    cells = entry.run(info, ["forward", "sharded", "bfloat16", "int64"])
    assert {name: (cell.status, cell.passed) for name, cell in cells.items()} == {
        "forward": ("pass", 3),
        "sharded": ("pass", 2),  # the number cannot be divided
        "bfloat16": ("pass", 3),
        "int64": ("pass", 3),
    }


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x * 2.01, lambda x: x.at[(0,) * x.ndim].set(0), lambda x: -x * 2],
    ids=["scaled", "one element", "sign"],
)
def test_a_wrong_lowering_is_a_wrong_value(wrong):
    cells = entry.run(an_entry(lambda x: x * 2, wrong), ["forward", "sharded"])
    for cell in cells.values():
        assert cell.status == "wrong"
        assert cell.passed == 0
        assert "elements differ, first at" in cell.reason


def test_a_lowering_wrong_for_some_samples_is_a_wrong_value():
    info = an_entry(lambda x: x * 2, lambda x: x * 2 if x.ndim else x * 3)
    cell = entry.run(info, ["forward"])["forward"]
    assert (cell.status, cell.passed, cell.samples) == ("wrong", 2, 3)


def test_a_missing_lowering_is_an_error_that_names_the_way_out():
    cell = entry.run(an_entry(lambda x: x * 2), ["forward"])["forward"]
    assert (cell.status, cell.passed) == ("error", 0)
    assert "NotImplementedError" in cell.reason
    assert "has no JAX lowering" in cell.reason


def test_a_lowering_that_does_not_compile_spares_the_other_samples():
    def fails_in_two_axes(x):
        if x.ndim == 2:
            raise ValueError("no matrices")
        return x * 2

    cell = entry.run(an_entry(lambda x: x * 2, fails_in_two_axes), ["forward"])["forward"]
    assert (cell.status, cell.passed, cell.samples) == ("error", 2, 3)
    assert "ValueError: no matrices" in cell.reason


def test_what_cannot_be_divided_is_no_sharded_sample():
    def odd(info, device, dtype, requires_grad, **_):
        yield SampleInput(torch.ones(5, 3, dtype=dtype))

    info = an_entry(lambda x: x * 2, lambda x: x * 2, sample_inputs_func=odd)
    cell = entry.run(info, ["sharded"])["sharded"]
    assert (cell.status, cell.reason) == (
        "none",
        "no operand has an axis that divides over the devices",
    )


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("add", ["forward", "backward", "in-place", "out=", "sharded", "bool"]),
        ("nonzero", ["forward"]),  # on the host
        ("bernoulli", ["forward"]),  # random
        ("softmax.with_dtype", ["forward"]),  # float64
        ("empty_like", ["forward"]),  # no values
        ("linalg.eigh", ["forward", "backward"]),  # up to a sign
    ],
)
def test_entries_of_the_database(name, columns):
    cells = entry.run(entries()[name], columns, limit=2 if name == "add" else 1)
    assert {column: (cell.status, cell.reason) for column, cell in cells.items()} == dict.fromkeys(
        columns, ("pass", "")
    )
    assert all(cell.samples for cell in cells.values())
    assert cells["forward"].host == (name == "nonzero")


def test_what_the_device_refuses_for_its_values_is_found(monkeypatch):
    """A sample whose fault is in the values must not be refused, as docs/pytorch.md promises."""
    assert entry.run(entries()["gather"], ["errors"])["errors"].status == "pass"
    monkeypatch.setattr(samples_module, "_BY_VALUES", re.compile("Index tensor must have"))
    assert entry.run(entries()["gather"], ["errors"])["errors"].status == "error"


def test_a_dtype_that_torch_cannot_make_is_no_sample():
    def fails(info, device, dtype, requires_grad, **_):
        yield SampleInput(torch.ones(2, dtype=dtype, requires_grad=not dtype.is_floating_point))

    info = an_entry(lambda x: x * 2, lambda x: x * 2, sample_inputs_func=fails)
    cell = entry.run(info, ["int64"])["int64"]
    assert (cell.status, cell.reason[:18]) == ("none", "torch: RuntimeErro")
