"""Numbers of a replay: equal step counts are computed once, unequal ones each for itself."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import metrics
from isoshard.torch_bridge.engine.capture.repeated import Ref, Repeated
from isoshard.torch_bridge.engine.values.expressions import Listed, Rows


@pytest.mark.parametrize("other", [0.0, -0.0, 3, float("nan"), 4.0])
def test_symbols_that_differ_in_any_bit_are_computed_apart(other):
    symbols = [3.0, 3.0]
    rows = [(lambda: symbols[0], ()), (lambda: symbols[1], ()), (2.0, ())]
    rows += [(lambda one, two: (one, two), (0, 2)), (lambda one, two: (one, two), (1, 2))]
    found = Rows(rows)
    assert len(found.values().numbers) < len(rows)
    symbols[1] = other
    present = found.values()
    assert repr([present[row] for row in (3, 4)]) == repr([(3.0, 2.0), (other, 2.0)])
    symbols[0], symbols[1] = 0.0, -0.0
    present = found.values()
    assert repr([present[row] for row in (3, 4)]) == "[(0.0, 2.0), (-0.0, 2.0)]"


@pytest.mark.parametrize("asked", [0, 1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_symbols_of_a_list_are_read_as_each_alone(asked, groups):
    numbers = [float(1 + n % groups) for n in range(6)]
    alone = [0.5] * asked
    reads = [functools.partial(alone.__getitem__, n) for n in range(asked)]
    reads += [Listed(numbers, n) for n in (4, 1, 2, 3)]
    rows = [(read, ()) for read in reads]
    rows += [(2.0, ()), *((operator.mul, (n, len(reads))) for n in range(len(reads)))]
    found = Rows(rows)
    for change in (None, (3, 9.0), (1, -0.0), (2, 0.0), (4, 1), (1, 5.0), (3, float("inf"))):
        if change is not None:
            numbers[change[0]] = change[1]
        present = found.values()
        wanted = [2.0 * read() for read in reads]
        assert repr([present[n] for n in range(len(reads) + 1, len(rows))]) == repr(wanted)


def test_lists_and_calls_in_any_order():
    one, two = [1.0, 2.0], [3.0]
    reads = [Listed(one, 1), lambda: 7.0, Listed(two, 0), Listed(one, 0)]
    present = Rows([(read, ()) for read in reads]).values()
    assert [present[n] for n in range(4)] == [2.0, 7.0, 3.0, 1.0]


@pytest.mark.parametrize(
    "second", [torch.tensor(7.0), torch.tensor([7.0]), torch.tensor(7.0).double()]
)
def test_reads_see_what_was_written_between_them(second):
    first, aten = torch.tensor(1.5), torch.ops.aten
    read = aten._local_scalar_dense.default
    ops = [
        (read, (first,), {}),
        (read, (second,), {}),
        (read, (first,), {}),
        (aten.add_.Tensor, (first, 1.0), {}),
        (aten.mul.Tensor, (first, 2.0), {}),
        (read, (first,), {}),
        (read, (Ref(4),), {}),
    ]
    results = [None] * len(ops)
    repeated = Repeated(ops, results)
    repeated.run(), repeated.run()
    assert results[:3] == [2.5, 7.0, 2.5] and results[5:] == [3.5, 7.0]
    assert operator.is_(results[3], first)


def test_parameters_of_unequal_step_counts_learn_as_without_compile():
    def train(compiled: bool) -> tuple[list[torch.Tensor], int]:
        parameters = [torch.nn.Parameter(torch.full((4,), n + 1.0).to("jax")) for n in range(4)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((one * x).square().sum() for one in parameters)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = xs.compile(step) if compiled else step
        x = torch.ones(()).to("jax")
        for _ in range(3):
            run(x)
        optimizer.state[parameters[1]]["step"].add_(5.0)
        captures = metrics.counters()["captures"] if compiled else 0
        for _ in range(3):
            run(x)
        more = metrics.counters()["captures"] - captures if compiled else 0
        return [one.detach().cpu() for one in parameters], more

    (found, more), (wanted, _) = train(True), train(False)
    assert more == 0
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0] - 1.0, found[1] - 2.0)
