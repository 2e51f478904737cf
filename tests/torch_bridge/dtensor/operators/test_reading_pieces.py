"""Values of `to_local()` are read where all devices have the same."""

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed.tensor import distribute_tensor
from tests.torch_bridge.dtensor.operators.placed import S0, R, data, mesh_of

READS = {
    "cpu": lambda t: t.cpu(),
    "to another dtype": lambda t: t.to("cpu", torch.float64).float(),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "elements": lambda t: torch.stack([torch.tensor(t[n].item()) for n in range(len(t))]),
}


@pytest.fixture
def whole():
    return data(8).float()


def pieces(whole, placements):
    return distribute_tensor(whole, mesh_of((2, 4)), placements).to_local()


@pytest.mark.parametrize("name", READS)
def test_copies_are_read_as_one(name, whole):
    assert torch.equal(READS[name](pieces(whole, [R, R])), whole)


def test_numbers_of_all_devices(whole):
    here = pieces(whole, [R, R])
    total = here.sum()
    assert total.item() == pytest.approx(whole.sum().item())
    assert bool(total > whole.sum().item() - 1) and f"{total:.1f}" == f"{whole.sum():.1f}"
    assert torch.equal(here, whole.to("jax")) and not torch.equal(here, here + 1)
    assert not torch.equal(here, here[:4])
    torch.testing.assert_close(here, whole.to("jax"))


def test_nans_are_equal():
    whole = torch.tensor([1.0, float("nan")])
    torch.testing.assert_close(pieces(whole, [R, R]).cpu(), whole, equal_nan=True)


def test_parts_that_happen_to_be_equal():
    assert pieces(torch.ones(8), [R, S0]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.cpu(),
        lambda t: t.sum().item(),
        lambda t: bool(t.sum() > 0),
        lambda t: t.tolist(),
        lambda t: torch.equal(t, t.new_zeros(2)),
    ],
)
def test_parts_that_differ_are_refused(read):
    here = pieces(torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), [R, S0])
    message = r"on CPU:0 and CPU:1 differ.*from_local.*local_shards"
    with pytest.raises(RuntimeError, match=message):
        read(here)


def test_gradients_from_the_cpu(whole):
    source = distribute_tensor(whole, mesh_of((2, 4)), [R, R]).requires_grad_()
    (source.to_local() * 2).cpu().square().sum().backward()
    torch.testing.assert_close(source.grad.cpu(), 8 * whole)
    source.grad = None
    source.to_local().cpu().square().sum().backward()
    torch.testing.assert_close(source.grad.cpu(), 2 * whole)
    xs.sync()
    assert source.grad.placements == (R, R)
