"""The order of samples: each once an epoch, whoever reads and wherever a run begins."""

import numpy as np
import pytest
import torch

import isoshard as iso


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (7, 7), (5, 8), (1, 3)])
def test_each_sample_comes_once_an_epoch(samples, batch):
    order = iso.data.BatchOrder(samples, batch, seed=3)
    steps = 5 * samples  # five times `batch` epochs
    numbers = np.concatenate([order.batch(step) for step in range(steps)])
    epochs = numbers.reshape(-1, samples)
    assert (np.sort(epochs, axis=1) == np.arange(samples)).all()
    if samples > 2:
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_run_goes_on_with_the_batch_that_comes_next():
    order = iso.data.BatchOrder(10, 4)
    whole = [batch.tolist() for _, batch in zip(range(9), order.after(0), strict=False)]
    again = iso.data.BatchOrder(10, 4)
    rest = [batch.tolist() for _, batch in zip(range(4), again.after(5), strict=False)]
    assert whole[5:] == rest


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_parts_of_a_batch_are_the_batch(parts):
    order = iso.data.BatchOrder(20, 6, seed=1)
    for step in (0, 3, 7):
        read = [order.batch(step, part, parts) for part in range(parts)]
        assert np.concatenate(read).tolist() == order.batch(step).tolist()


def test_as_batch_sampler_of_torch():
    rows = torch.arange(40).reshape(20, 2)
    order = iso.data.BatchOrder(20, 4)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=order.after(2, part=1, parts=2))
    assert torch.equal(next(iter(loader)), rows[order.batch(2, 1, 2)])


def test_seeds_and_epochs_differ_and_may_be_left_out():
    first = [iso.data.BatchOrder(50, 50, seed=seed).batch(0).tolist() for seed in range(3)]
    assert len({tuple(one) for one in first}) == 3
    plain = iso.data.BatchOrder(5, 3, shuffle=False)
    assert [plain.batch(step).tolist() for step in range(2)] == [[0, 1, 2], [3, 4, 0]]
    assert repr(plain) == "BatchOrder(5, 3, seed=0, shuffle=False)"


def test_its_state_is_saved_and_compared(tmp_path):
    order = iso.data.BatchOrder(10, 4, seed=1)
    iso.save(tmp_path, {"data": order.state_dict(3)}, step=3)
    found = iso.restore(tmp_path, {"data": order.state_dict(3)})["data"]
    order.check(found, 3)
    other = iso.data.BatchOrder(11, 4, seed=2, shuffle=False)
    wrong = r"step 3 .* samples is 11, and was 10; seed is 2, and was 1; shuffle is False, and was"
    with pytest.raises(iso.CheckpointError, match=wrong):
        other.check(found, 3)
    with pytest.raises(iso.CheckpointError, match=r"NumPy .* shuffles differently"):
        order.check({**found, "crc32": 0}, 3)


def test_numbers_and_parts_that_are_not_possible():
    for given, told in (
        ((0, 4), "samples=0 is no integer of at least 1"),
        ((4, 0), "batch=0"),
        ((2.5, "a"), r"samples=2.5 .*; batch='a'"),
        ((True, 4), "samples=True"),
    ):
        with pytest.raises(iso.ShardingError, match=told):
            iso.data.BatchOrder(*given)
    for given in ((-1, 0, 1), (0, 2, 2), (0, 0, 3), (0, -1, 2)):
        with pytest.raises(iso.ShardingError, match="there is no part"):
            iso.data.BatchOrder(10, 4).batch(*given)
