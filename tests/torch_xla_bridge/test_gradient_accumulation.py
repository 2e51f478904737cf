"""`gradient_accumulation`, the GRU, and eager mode."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_xla_bridge.torch_xla.experimental.eager import (
    eager_mode,
    eager_mode_context,
    is_eager_mode,
)
from isoshard.torch_xla_bridge.torch_xla.experimental.gradient_accumulation import (
    gradient_accumulation,
)
from isoshard.torch_xla_bridge.torch_xla.experimental.gru import GRU

functional = torch.nn.functional


def by_hand(step, batches, model, *carried):
    total = 0.0
    for batch in zip(*batches, strict=True):
        result = step(*batch, *carried)
        loss, *carried = result if isinstance(result, tuple) else (result,)
        loss = loss / len(batches[0])
        loss.backward()
        total = total + loss.detach()
    return (total, *carried) if carried else total


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    ).double()


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_loss_gradients_buffers_and_carried_tensors(x64):
    x, y = data(5, 6, 4), torch.arange(30).reshape(5, 6) % 3

    def run(loop, device):
        model = build().to(device)
        model[0].bias.requires_grad_(False)
        carried = [t.to(device) for t in (torch.tensor(10), torch.ones(2), torch.zeros(3))]

        def step(x, y, count, doubled, summed):
            loss = functional.cross_entropy(model(x), y) * 2
            return loss, count + 10, doubled * 2, summed + 1

        for _ in range(2):  # the second time gradients are there already
            loss, *carried = loop(step, (x.to(device), y.to(device)), model, *carried)
        assert model[0].bias.grad is None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().cpu() for t in (loss, *carried, *gradients, *model.buffers())]

    got, want = run(gradient_accumulation, "jax"), run(by_hand, "cpu")
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_one_program_for_any_number_of_batches(counted):
    model, x = build().float().to("jax"), data(16, 6, 4).float().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    xs.sync()
    losses, compilations, calls = [], [], []
    for _ in range(3):

        def step(x):
            calls.append(1)
            return model(x).square().mean()

        optimizer.zero_grad()
        losses.append(gradient_accumulation(step, (x,), model))
        entries = len([e for e in tapes.recorder().program if isinstance(e[0], int)])
        optimizer.step()
        xs.sync()
        compilations.append(counted("compilations"))
        assert entries < 20
    assert len(calls) == 3
    assert compilations[1:] == [compilations[1]] * 2
    values = [loss.item() for loss in losses]
    assert values == sorted(values, reverse=True)
    assert isinstance(losses[0], torch.Tensor)
    assert not losses[0].requires_grad


def test_random_numbers_differ_between_batches():
    model = torch.nn.Linear(1, 1, bias=False).to("jax")
    x = torch.ones(8, 64, 1, device="jax")
    seen = torch.zeros(8, 64, device="jax")
    place = torch.tensor(0).to("jax")

    def step(x, seen, place):
        dropped = functional.dropout(x, 0.5)
        rows = torch.arange(8, device="jax")[:, None] == place
        return model(dropped).mean(), torch.where(rows, dropped[:, 0], seen), place + 1

    _, seen, _ = gradient_accumulation(step, (x,), model, seen, place)
    assert len({tuple(row) for row in seen.tolist()}) == 8
    torch.testing.assert_close(model.weight.grad.cpu(), seen.mean().reshape(1, 1).cpu())


def test_sharded_parameters_get_sharded_gradients_and_hooks_are_called(mesh):
    """In a compiled step."""
    model, seen = torch.nn.Linear(8, 8).to("jax"), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    xs.mark_sharding(model.weight, mesh, ("y", None))
    x = xs.mark_sharding(torch.ones(3, 4, 8).to("jax"), mesh, (None, "x", None))
    step = xs.compile(lambda x: gradient_accumulation(lambda x: model(x).sum(), (x,), model))
    step(x)
    assert seen == [(8, 8)]
    assert model.weight.grad.sharding_spec == model.weight.sharding_spec
    torch.testing.assert_close(model.weight.grad.cpu(), torch.full((8, 8), 4.0))


def test_mistakes():
    model, x = torch.nn.Linear(2, 1).to("jax"), torch.ones(3, 4, 2, device="jax")
    step = lambda x: model(x).sum()  # noqa: E731
    with pytest.raises(ValueError, match="at least one tensor"):
        gradient_accumulation(step, (), model)
    with pytest.raises(ValueError, match=r"batches\[1\] is no tensor, but list"):
        gradient_accumulation(step, (x, [1]), model)
    with pytest.raises(ValueError, match=r"batches\[0\] of shape \(0, 2\) is empty"):
        gradient_accumulation(step, (torch.ones(0, 2, device="jax"),), model)
    with pytest.raises(ValueError, match=r"have different lengths: \[3, 2\]"):
        gradient_accumulation(step, (x, x[:2]), model)
    with pytest.raises(ValueError, match=r"carried\[0\] is on cpu"):
        gradient_accumulation(step, (x,), model, torch.ones(1))
    with pytest.raises(ValueError, match="must return a loss of one element"):
        gradient_accumulation(lambda x: model(x), (x,), model)
    with pytest.raises(ValueError, match="returned 0 besides the loss"):
        gradient_accumulation(lambda x, c: model(x).sum(), (x,), model, x[0])
    with pytest.raises(TypeError, match=r"carried\[0\] is \(4, 2\) .*, the new one \(2,\)"):
        gradient_accumulation(lambda x, c: (model(x).sum(), c[0]), (x,), model, x[0])
    with pytest.raises(ValueError, match="does not depend on a parameter of the model"):
        gradient_accumulation(lambda x: x.sum(), (x,), model)


# --- The GRU -------------------------------------------------------------------------------------


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def both(*args, **kwargs):
    """torch's module, and ours on the device with its numbers."""
    torch.manual_seed(0)
    theirs, ours = torch.nn.GRU(*args, **kwargs), GRU(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.to("jax")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"batch_first": True, "bias": False}, (2, 5, 3)),
        ({"num_layers": 2}, (5, 3)),
        ({"bidirectional": True}, (2, 2, 3)),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_torchs(options, shape):
    theirs, ours = both(3, 4, **options)
    x = draw(*shape).requires_grad_()
    y = x.detach().to("jax").requires_grad_()
    want, got = theirs(x), ours(y)
    want[0].square().sum().backward()
    got[0].square().sum().backward()
    found = [*got, y.grad, *(p.grad for p in ours.parameters())]
    wanted = [*want, x.grad, *(p.grad for p in theirs.parameters())]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-4, atol=1e-5)


def test_dropout_is_between_layers_while_training():
    theirs, ours = both(3, 4, num_layers=2, dropout=0.5)
    assert [list(w.shape) for w in ours.weight_ih] == [[12, 3], [12, 4]]
    assert ours.bias_hh[1] is ours.bias_hh_l1 and GRU(3, 4, bias=False).bias_ih == []
    x = draw(5, 2, 3)
    ours.eval()
    want = theirs.eval()(x)[0]
    torch.testing.assert_close(ours(x.to("jax"))[0].cpu(), want, rtol=1e-4, atol=1e-5)
    ours.train()
    assert not torch.equal(ours(x.to("jax"))[0].cpu(), ours(x.to("jax"))[0].cpu())


def test_the_cpu_and_packed_sequences_are_torchs():
    theirs, _ = both(3, 4)
    on_cpu = GRU(3, 4)
    on_cpu.load_state_dict(theirs.state_dict())
    x = draw(5, 2, 3)
    assert torch.equal(on_cpu(x)[0], theirs(x)[0])
    packed = pack_sequence([x[:, 0], x[:3, 1]])
    assert torch.equal(on_cpu(packed)[0].data, theirs(packed)[0].data)


def test_shapes_that_do_not_fit():
    gru = GRU(3, 4).to("jax")
    for x, hx, message in (
        ((5, 2, 7), None, "Expected 3, got 7"),
        ((5, 2, 3), (2, 2, 4), "Expected hidden size"),
        ((5, 3), (1, 1, 4), "as many axes as the input, 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            gru(draw(*x).to("jax"), None if hx is None else draw(*hx).to("jax"))
    with pytest.raises(ValueError, match="2 or 3 axes"):
        gru(draw(1, 2, 3, 3).to("jax"))


# --- Eager mode ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def switched_off():
    yield
    eager_mode(False)


def test_each_operation_is_executed_at_once(counted):
    x = torch.ones(4).to("jax").requires_grad_()
    xs.sync()
    before = counted("executions")
    eager_mode(True)
    y = (x * 2).tanh()
    assert counted("executions") == before + 2
    assert y._storage.value.array is not None
    y.sum().backward()
    during = counted("executions")
    assert during > before + 4
    eager_mode(False)
    (y.detach() * 3 + 1).exp_()
    assert counted("executions") == during
    want = torch.ones(4, requires_grad=True)
    (want * 2).tanh().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), want.grad)


def test_the_context_gives_and_restores_what_was():
    assert not is_eager_mode()
    with eager_mode_context(True) as before:
        assert (before, is_eager_mode()) == (False, True)
        with eager_mode_context(False) as inner:
            assert (inner, is_eager_mode()) == (True, False)
        assert is_eager_mode()
    with pytest.raises(ZeroDivisionError), eager_mode_context(True):
        raise ZeroDivisionError
    assert not is_eager_mode()


def test_a_compiled_step_stays_one_program(counted):
    model = torch.nn.Linear(4, 4).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @xs.compile
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 4).to("jax")
    with eager_mode_context(True):
        step(x), step(x)
        before = counted("executions")
        step(x)
        assert counted("executions") == before + 1


def test_the_operation_that_fails_is_the_one_that_raises():
    with eager_mode_context(True):
        x = torch.ones(2, 3, device="jax")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        assert (x + 1).sum().item() == 12
