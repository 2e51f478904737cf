"""Samples: unlike each other, complete, and of sizes that divide where the layout needs it."""

import torch
from jax.sharding import PartitionSpec as P
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import SampleInput

from tests.conformance import samples
from tests.conformance.database import entries
from tests.conformance.layout import spec_of, spread


def test_the_database_is_the_one_of_the_issue():
    assert len(entries()) >= 600
    assert all(torch.float32 in info.dtypes for info in entries().values())


def test_structures_come_first():
    chosen = samples.choose(entries()["add"], torch.float32, 4)
    assert len(chosen) == 4
    assert len({samples._structure(sample) for sample in chosen}) > 1


def test_even_sizes_hold_inside_the_context_only():
    def shape():
        return next(iter(entries()["sin"].sample_inputs("cpu", torch.float32))).input.shape

    usual = shape()
    with samples.even_sizes():
        assert core.S == 8
        even = shape()
    assert core.S == 5
    assert shape() == usual
    assert even != usual
    assert all(extent % 2 == 0 for extent in even)


def test_a_moved_sample_is_on_the_device_as_a_whole():
    shared = torch.ones(2, requires_grad=True)
    sample = SampleInput(shared, args=([shared, 3],), kwargs={"device": torch.device("cpu")})
    moved = samples.moved(sample, lambda tensor: tensor.to("jax"))
    assert moved.input.device.type == "jax"
    assert moved.input is moved.args[0][0]
    assert moved.input.requires_grad
    assert moved.args[0][1] == 3
    assert moved.kwargs["device"] == torch.device("jax")


def test_a_widened_sample_holds_the_same_numbers():
    sample = SampleInput(torch.ones(2), kwargs={"dtype": torch.float32, "index": torch.arange(2)})
    wide = samples.widened(sample)
    assert wide.input.dtype == wide.kwargs["dtype"] == torch.float64
    assert wide.kwargs["index"].dtype == torch.int64


def test_the_first_axis_that_can_be_divided_is():
    assert spec_of(torch.ones(8, 16)) == P(("a", "b", "c"))
    assert spec_of(torch.ones(3, 16)) == P(None, ("a", "b", "c"))
    assert spec_of(torch.ones(6, 4)) == P(None, ("a", "b"))
    assert spec_of(torch.ones(10, 5)) == P("a")
    assert spec_of(torch.ones(5, 0)) is None
    assert spec_of(torch.ones(())) is None
    assert len(spread(torch.ones(8, 2)).named_sharding.device_set) == 8


def test_faults_in_values_are_told():
    names = [sample.name for sample in samples.refused_by(entries()["gather"])]
    assert names.count(samples.VALUES) == 1
    assert names.count("") == len(names) - 1 > 2
