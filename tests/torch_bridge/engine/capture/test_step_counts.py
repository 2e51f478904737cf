"""Numbers of a replay: step counts with the bits that torch gives, whatever is done to them."""

from __future__ import annotations

import math
import operator

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import metrics
from isoshard.torch_bridge.engine.capture.cpu_ops import OpResult, ReplayedOps, StepCounts, is_count
from isoshard.torch_bridge.engine.values.expressions import Rows

aten = torch.ops.aten
READ = aten._local_scalar_dense.default

NUMBERS = {
    torch.float32: [1, 0.1, -3.7, 2**24, 16777217, 1e-40, 3e38, torch.tensor(0.1)],
    torch.float64: [1, 0.1, -3.7, 2**53 + 1, 1e300, torch.tensor(0.1).double()],
}


@pytest.mark.parametrize("start", [0, 3, 16777216, -7, 3e38])
def test_an_addition_gives_torchs_bits(start):
    for dtype, number in [(dtype, one) for dtype, ones in NUMBERS.items() for one in ones]:
        ours, theirs = (torch.tensor(start, dtype=dtype) for _ in range(2))
        if isinstance(number, torch.Tensor):
            counts = StepCounts([ours, number])
            add = counts.count_adder([0], 1)
        else:
            counts = StepCounts([ours])
            add = counts.adder([0], number)
        read = counts.reader([0])
        for _ in range(3):
            add()
            theirs.add_(number)
            assert read() == [theirs.item()]
            assert torch.equal(ours, theirs)
        assert ours._version == theirs._version


with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns without
    SPARSE = torch.sparse_coo_tensor(size=())
OTHERS = (
    torch.ones(1),
    torch.tensor(1.0, dtype=torch.bfloat16),
    torch.tensor(1, dtype=torch.int32),
    torch.tensor(1),
    torch.tensor(1.0, requires_grad=True),
    torch.nn.Parameter(torch.tensor(1.0), requires_grad=False),
    torch.tensor(1.0, device="meta"),
    torch.imag(torch.tensor(1j).conj()),
    SPARSE,
    1.0,
)


def test_other_tensors_go_through_torch():
    empty = torch.tensor(1.0)
    empty.untyped_storage().resize_(0)
    with torch.inference_mode():
        others = (*OTHERS, torch.tensor(1.0, device="jax"), torch.tensor(1.0), empty)
    assert [one for one in others if is_count(one)] == []


def _written(count: torch.Tensor) -> None:
    count.numpy()[()] = 17.0


CHANGES = {
    "moved": (lambda count: setattr(count, "data", torch.tensor(40.0)), 42.0),
    "widened": (lambda count: setattr(count, "data", count.data.double()), 4.0),
    "retyped": (lambda count: setattr(count, "data", count.data.bfloat16()), 4.0),
    "written": (_written, 19.0),
    "shared": (torch.Tensor.share_memory_, 4.0),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("foreach", [True, False])
def test_what_a_program_does_to_a_count_is_seen(name, foreach):
    change, wanted = CHANGES[name]
    tensors = [torch.tensor(float(n)) for n in range(3)]
    ops = [(aten.add_.Tensor, (one, 1), {}) for one in tensors]
    if foreach:
        ops = [(aten._foreach_add_.Tensor, (tensors, torch.tensor(1.0)), {"alpha": 1.0})]
    ops += [(READ, (one,), {}) for one in tensors]
    results: list[object] = [None] * len(ops)
    repeat = ReplayedOps(ops, results)
    repeat.run()
    assert results[-3:] == [1.0, 2.0, 3.0]
    change(tensors[1])
    for _ in range(2):
        repeat.run()
        assert results[-3:] == [one.item() for one in tensors]
    assert results[-3:] == [3.0, wanted, 5.0]


def test_a_count_that_became_a_vector_is_refused_as_torch_refuses_it():
    count = torch.tensor(1.0)
    repeat = ReplayedOps([(READ, (count,), {})], [None])
    repeat.run()
    count.resize_(2)
    with pytest.raises(RuntimeError, match="2 elements"):
        repeat.run()


def test_an_operation_that_moves_memory_in_between_is_seen():
    count, other = torch.tensor(1.0), torch.tensor(50.0)
    add, read = (aten.add_.Tensor, (count, 1), {}), (READ, (count,), {})
    ops = [add, read, (aten.set_.source_Tensor, (count, other), {}), add, read]
    results = [None] * len(ops)
    repeat = ReplayedOps(ops, results)
    for wanted in ((2.0, 51.0), (52.0, 53.0)):
        repeat.run()
        assert (results[1], results[4]) == wanted


@pytest.mark.parametrize(
    "second", [torch.tensor(7.0), torch.tensor([7.0]), torch.tensor(7.0).double()]
)
def test_reads_see_what_was_written_between_them(second):
    first = torch.tensor(1.5)
    ops = [
        (READ, (first,), {}),
        (READ, (second,), {}),
        (READ, (first,), {}),
        (aten.add_.Tensor, (first, 1.0), {}),
        (aten.mul.Tensor, (first, 2.0), {}),
        (READ, (first,), {}),
        (READ, (OpResult(4),), {}),
    ]
    results = [None] * len(ops)
    repeated = ReplayedOps(ops, results)
    repeated.run(), repeated.run()
    assert results[:3] == [2.5, 7.0, 2.5] and results[5:] == [3.5, 7.0]
    assert operator.is_(results[3], first)


def test_what_operations_may_write():
    count, one, made = torch.tensor(1.0), torch.tensor(1.0), torch.zeros(2)
    ops = [(aten._foreach_add_.Tensor, ([count], one), {}), (READ, (count,), {})]
    repeat = ReplayedOps(ops, [None] * 2)
    assert repeat.may_write(count) and not repeat.may_write(one)
    assert ReplayedOps([*ops, (aten.mul_.Tensor, (made, one), {})], [None] * 3).may_write(made)


def test_counts_that_are_given_twice_or_in_other_dtypes_or_on_a_default_device():
    ours, theirs = ([torch.tensor(one) for one in (2.0, 3.0, 5.0)] for _ in range(2))
    ops = [(aten._foreach_add_.Tensor, (ours, ours[0]), {}), (READ, (ours[2],), {})]
    ReplayedOps(ops, [None] * 2).run()
    aten._foreach_add_.Tensor(theirs, theirs[0])
    assert ours == theirs
    count = torch.tensor(2.0)
    ReplayedOps([(aten._foreach_add_.Scalar, ([count, count], 1), {})], [None]).run()
    assert count.item() == 4.0
    with torch.device("meta"):
        StepCounts([count]).adder([0], 2)()
    assert count.item() == 6.0
    several = [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3.0)]
    assert StepCounts(several).reader([0, 1, 2])() == [one.item() for one in several]


# --- The rows of numbers that a replay computes --------------------------------------------------


@pytest.mark.parametrize("other", [-0.0, 3, math.nan])
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
        captures = metrics.counters()["captures"]
        for _ in range(3):
            run(x)
        more = metrics.counters()["captures"] - captures
        return [one.detach().cpu() for one in parameters], more

    (found, more), (wanted, _) = train(True), train(False)
    assert more == 0
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0] - 1.0, found[1] - 2.0)
