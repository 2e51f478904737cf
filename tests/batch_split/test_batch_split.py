"""The table of docs/batch_split.md: some of its entries anew, and that it is what was found."""

from __future__ import annotations

import json

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (the device)
from tests.conformance.database import entries

from . import report
from .own_cases import OWN
from .rows import batches
from .sent import Sent, outcome, sent_for

SILENT = ("add", "bmm", "max.reduction_with_dim", "topk")


@pytest.mark.parametrize("name", [*OWN, *SILENT])
def test_nothing_is_sent(name):
    found = outcome((OWN | entries())[name], 4)
    assert found.samples and not found.fault
    assert found.sent == Sent({}, {})


def test_what_is_sent_is_seen():
    (batch,) = batches(OWN["conv2d in 8 groups of 16"], 1)

    class Crossing:
        """The rows in the opposite order."""

        supports_autograd = True

        def __call__(self, x, weight, **options):
            return torch.nn.functional.conv2d(x.flip(0), weight, **options)

    sent = sent_for(Crossing(), [batch])
    assert sent.forward and sent.gradient


def test_rows_that_meet_are_no_batch():
    assert not batches(entries()["flipud"], 1)


def test_the_page_is_what_was_found():
    found = json.loads(report.RESULTS.read_text())
    outcomes = report.read()
    page = report.document(outcomes, found["versions"], found["command"])
    assert report.DOCUMENT.read_text() == page
    assert {name for name in OWN if any(outcomes[name].sent)} == set()
    assert [
        name for name, one in outcomes.items() if any(one.sent) and not report.reason(name)
    ] == []
