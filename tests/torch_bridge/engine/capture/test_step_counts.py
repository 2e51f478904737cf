"""Step counts in memory: the bits that torch gives, and whatever a program does to the tensors."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge.engine.capture.repeated import Repeated
from isoshard.torch_bridge.engine.capture.step_counts import StepCounts, is_count

aten = torch.ops.aten
READ = aten._local_scalar_dense.default

NUMBERS = {
    torch.float32: [1, 0.1, -3.7, 2**24, 16777217, 1e-40, 3e38, torch.tensor(0.1)],
    torch.float64: [1, 0.1, -3.7, 2**53 + 1, 1e300, torch.tensor(0.1).double()],
}


@pytest.mark.parametrize(
    ("dtype", "number"), [(dtype, one) for dtype, ones in NUMBERS.items() for one in ones]
)
@pytest.mark.parametrize("start", [0, 3, 16777216, -7])
def test_an_addition_gives_torchs_bits(dtype, number, start):
    ours, theirs = (torch.tensor(start, dtype=dtype) for _ in range(2))
    if isinstance(number, torch.Tensor):
        counts = StepCounts([ours, number])
        add = counts.adding_one([0], 1)
    else:
        counts = StepCounts([ours])
        add = counts.adding([0], number)
    read = counts.reading([0])
    for _ in range(3):
        add()
        theirs.add_(number)
        assert read() == [theirs.item()]
        assert torch.equal(ours, theirs)
    assert ours._version == theirs._version


with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns without
    SPARSE = torch.sparse_coo_tensor(size=())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor(1, dtype=torch.int32),
        torch.tensor(1),
        torch.tensor(1.0, requires_grad=True),
        torch.nn.Parameter(torch.tensor(1.0), requires_grad=False),
        torch.tensor(1.0, device="meta"),
        torch.tensor(1.0, device="jax"),
        torch.imag(torch.tensor(1j).conj()),
        SPARSE,
        1.0,
    ],
)
def test_other_tensors_go_through_torch(tensor):
    assert not is_count(tensor)


def test_an_inference_tensor_goes_through_torch():
    with torch.inference_mode():
        assert not is_count(torch.tensor(1.0))


def _moved(count: torch.Tensor) -> None:
    count.data = torch.tensor(40.0)


def _widened(count: torch.Tensor) -> None:
    count.data = count.data.double()


def _retyped(count: torch.Tensor) -> None:
    count.data = count.data.to(torch.bfloat16)


def _written(count: torch.Tensor) -> None:
    count.numpy()[()] = 17.0


def _shared(count: torch.Tensor) -> None:
    count.share_memory_()


@pytest.mark.parametrize("change", [_moved, _widened, _retyped, _written, _shared])
@pytest.mark.parametrize("foreach", [True, False])
def test_what_a_program_does_to_a_count_is_seen(change, foreach):
    def repeated(tensors: list[torch.Tensor]) -> tuple[Repeated, list[object]]:
        adds = [(aten.add_.Tensor, (one, 1), {}) for one in tensors]
        if foreach:
            adds = [(aten._foreach_add_.Tensor, (tensors, torch.tensor(1.0)), {"alpha": 1.0})]
        ops = [*adds, *((READ, (one,), {}) for one in tensors)]
        results: list[object] = [None] * len(ops)
        return Repeated(ops, results), results

    tensors = [torch.tensor(float(n)) for n in range(3)]
    repeat, results = repeated(tensors)
    repeat.run()
    assert results[-3:] == [1.0, 2.0, 3.0]
    change(tensors[1])
    for _ in range(2):
        repeat.run()
        before = tensors[1].item()
        assert results[-3:] == [tensors[0].item(), before, tensors[2].item()]
    assert [one.item() for one in tensors] == [3.0, before, 5.0]
    wanted = {_moved: 42.0, _widened: 4.0, _retyped: 4.0, _written: 19.0, _shared: 4.0}
    assert before == wanted[change]


def test_a_count_that_became_a_vector_is_refused_as_torch_refuses_it():
    count = torch.tensor(1.0)
    repeat = Repeated([(READ, (count,), {})], [None])
    repeat.run()
    count.resize_(2)
    with pytest.raises(RuntimeError, match="2 elements"):
        repeat.run()


def test_an_operation_that_moves_memory_in_between_is_seen():
    count, other = torch.tensor(1.0), torch.tensor(50.0)
    ops = [
        (aten.add_.Tensor, (count, 1), {}),
        (READ, (count,), {}),
        (aten.set_.source_Tensor, (count, other), {}),
        (aten.add_.Tensor, (count, 1), {}),
        (READ, (count,), {}),
    ]
    results = [None] * len(ops)
    repeat = Repeated(ops, results)
    repeat.run()
    assert (results[1], results[4]) == (2.0, 51.0)
    repeat.run()
    assert (results[1], results[4]) == (52.0, 53.0)


def test_what_operations_may_write():
    count, one, made = torch.tensor(1.0), torch.tensor(1.0), torch.zeros(2)
    ops = [(aten._foreach_add_.Tensor, ([count], one), {}), (READ, (count,), {})]
    repeat = Repeated(ops, [None] * 2)
    assert repeat.may_write(count) and not repeat.may_write(one)
    more = [*ops, (aten.mul_.Tensor, (made, one), {})]
    assert Repeated(more, [None] * 3).may_write(made)


def test_a_count_that_is_added_to_others_is_added_as_torch_does_it():
    def made() -> list[torch.Tensor]:
        return [torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0)]

    ours, theirs = made(), made()
    ops = [(aten._foreach_add_.Tensor, (ours, ours[0]), {}), (READ, (ours[2],), {})]
    Repeated(ops, [None] * 2).run()
    aten._foreach_add_.Tensor(theirs, theirs[0])
    assert ours == theirs


def test_a_count_that_is_given_twice_is_added_to_twice():
    count = torch.tensor(2.0)
    Repeated([(aten._foreach_add_.Scalar, ([count, count], 1), {})], [None]).run()
    assert count.item() == 4.0


def test_counts_of_several_dtypes_are_read_together():
    ours = [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3.0)]
    assert StepCounts(ours).reading([0, 1, 2])() == [one.item() for one in ours]


def test_sums_beyond_the_dtype_are_infinite_as_in_torch():
    ours, theirs = torch.tensor(3e38), torch.tensor(3e38)
    StepCounts([ours]).adding([0], 3e38)()
    assert torch.equal(ours, theirs.add_(3e38))


def test_a_tensor_without_memory_goes_through_torch():
    tensor = torch.tensor(1.0)
    tensor.untyped_storage().resize_(0)
    assert not is_count(tensor)


def test_a_default_device_takes_no_number_there():
    count = torch.tensor(1.0)
    with torch.device("meta"):
        StepCounts([count]).adding([0], 2)()
    assert count.item() == 3.0
