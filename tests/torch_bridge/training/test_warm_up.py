"""How many programs a loop compiles before it is steady, wherever its values are read."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

STEPS = 4
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "NAdam": torch.optim.NAdam}


def model_on(mesh):
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 8)
    )
    if mesh is None:
        return made.to("jax")
    return iso.shard(made, mesh, iso.Plan.fsdp("y", min_bytes=0))


def train(model, kind, reads):
    """Losses of a loop that reads at one place, and how many programs each step compiled."""
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    losses, compiled = [], []
    for _ in range(STEPS):
        before = len(iso.metrics.compilations())
        x = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if reads == "forward":
            loss.item()
        loss.backward()
        if reads == "backward":
            xs.sync()
        optimizer.step()
        if reads == "end":
            loss.item()
        losses.append(loss.detach())
        compiled.append(len(iso.metrics.compilations()) - before)
    xs.sync()
    return [loss.item() for loss in losses], compiled


@pytest.mark.parametrize(
    ("reads", "on_mesh"),
    [("forward", True), ("backward", False)],
)
def test_a_loop_is_steady_after_two_programs(reads, on_mesh, mesh):
    xs.sync()
    model = model_on(mesh if on_mesh else None)
    losses, compiled = train(model, "AdamW", reads)
    assert sum(compiled) <= 2 and compiled[2:] == [0] * (STEPS - 2), compiled
    expected, _ = train(model_on(None).cpu(), "AdamW", "never")
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_program_where_the_loss_is_read_at_the_end(kind):
    xs.sync()
    losses, compiled = train(model_on(None), kind, "end")
    assert sum(compiled) <= 1 and not any(compiled[1:]), compiled
    expected, _ = train(model_on(None).cpu(), kind, "never")
    assert losses == pytest.approx(expected, rel=1e-5)


def test_what_nobody_reads_makes_no_other_program():
    x = torch.arange(6.0, device="jax")
    xs.sync()

    def compiled(unused):
        before = len(iso.metrics.compilations())
        unused(x)
        found = ((x * 3).sin() + 1).tolist()
        assert found == pytest.approx([float(v) for v in (torch.arange(6.0) * 3).sin() + 1])
        return len(iso.metrics.compilations()) - before

    assert compiled(lambda x: None) == 1
    assert compiled(lambda x: x.cos() * 2 - x) == 0
    assert compiled(lambda x: torch.empty(3, 4, device="jax")) == 0
    assert compiled(lambda x: x.sort()) == 0


def test_memory_of_the_host_is_never_given_away():
    """A program may overwrite what was brought to the devices, and not what it was brought from."""
    for size in (4, 1 << 16):
        host = torch.ones(size)
        device = host.to("jax")
        copy, array = device.cpu(), device.detach().numpy(force=True)
        for _ in range(3):
            device.add_(1)
            xs.sync()
        assert torch.equal(host, torch.ones(size)) and torch.equal(copy, host)
        assert (array == 1).all() and torch.equal(device.cpu(), host + 3)


def test_inputs_from_the_host_are_donated_in_the_first_program(counted):
    weight = torch.ones(1 << 12).to("jax")
    xs.sync()
    before = counted("donated_bytes")
    weight.mul_(2)
    xs.sync()
    assert counted("donated_bytes") - before == weight.nbytes


def test_zeros_in_every_step_are_part_of_the_program(counted):
    weight = torch.nn.Parameter(torch.ones(8, device="jax"))
    xs.sync()
    sent = []
    for number in range(7):
        before = counted("transfers.host_to_device_bytes")
        found = torch.zeros_like(weight) + weight.detach() * number
        assert found.tolist() == [float(number)] * 8
        sent.append(counted("transfers.host_to_device_bytes") - before >= weight.nbytes)
    assert sent == [True] * 4 + [False] * 3
