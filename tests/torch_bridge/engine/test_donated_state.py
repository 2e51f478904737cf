"""Storages that a captured step owns: reading one gives what the step wrote."""

import copy
import gc
import threading
import weakref

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from isoshard.torch_bridge.engine.capture.donated_state import OwnedStorage
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.values.value import Storage


def trainer(device="jax"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batches(count):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=draw) for _ in range(count)]


LOOKS = {
    "read": lambda model, optimizer: model[0].weight.detach().cpu(),
    "taken by JAX": lambda model, optimizer: iso.to_jax(model[0].weight.detach()),
    "written": lambda model, optimizer: torch.no_grad()(model[0].weight.mul_)(0.5),
    "written through a view": lambda model, optimizer: model[2].weight.data[0].zero_(),
    "replaced": lambda model, optimizer: setattr(
        model[0].bias, "data", torch.ones(3, device=model[0].bias.device)
    ),
    "used in a recorded operation": lambda model, optimizer: model[2].weight.detach() * 2,
    "state loaded": lambda model, optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "copied": lambda model, optimizer: copy.deepcopy(model),
    "laid out": lambda model, optimizer: (
        xs.mark_sharding(model[0].weight, iso.make_mesh((4,), ("x",)), (None, "x"))
        if model[0].weight.device.type == "jax"
        else None
    ),
}


@pytest.mark.parametrize(("look", "keeps"), list(zip(LOOKS, [True, False] * 6, strict=False)))
def test_looking_between_two_runs(look, keeps):
    results = []
    for device in ("cpu", "jax"):
        model, optimizer, step = trainer(device)
        run = xs.compile(step) if device == "jax" else step
        losses, held = [], []
        for number, batch in enumerate(batches(6)):
            losses.append(run(batch.to(device)).cpu())
            if number % 3 == 2:
                seen = LOOKS[look](model, optimizer)
                held += [seen] if keeps else []
        results.append([*losses, *(p.detach().cpu() for p in model.parameters())])
        if device == "jax" and keeps:
            for one in held:
                if isinstance(one, torch.Tensor):
                    assert one.isfinite().all()  # nobody has taken its memory
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_reading_moves_the_array_out_and_the_next_run_takes_it_back():
    model, _, step = trainer()
    run = xs.compile(step)
    for batch in batches(4):
        run(batch.to("jax"))
    memory = [p._storage for p in model.parameters()]
    assert {type(one) for one in memory} == {OwnedStorage}
    value = memory[0].value
    assert [type(one) for one in memory] == [Storage, OwnedStorage, OwnedStorage, OwnedStorage]
    before = value.array
    metrics.reset()
    run(batches(1)[0].to("jax"))
    assert metrics.counters()["copies"] == 1 and not before.is_deleted()
    del value, before
    run(batches(1)[0].to("jax"))
    assert metrics.counters()["copies"] == 1 and metrics.counters()["captures"] == 0
    assert {type(one) for one in memory} == {OwnedStorage}


def test_a_failed_run_leaves_the_memory_where_it_was(monkeypatch):
    model, _, step = trainer()
    run = xs.compile(step)
    for batch in batches(3):
        run(batch.to("jax"))
    held = model[0].weight.detach()._storage.value
    before = [p.detach().clone() for p in model.parameters()]
    xs.sync()

    def fails(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(program, "run", fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            run(batches(1)[0].to("jax"))
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), before))
    del held
    for batch in batches(2):
        run(batch.to("jax"))
    assert not any(map(torch.equal, model.parameters(), before))


def test_two_steps_take_turns_and_one_that_only_reads():
    results = []
    for device in ("cpu", "jax"):
        model, _, step = trainer(device)

        def shrink(x, model=model):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(x.mean())
            return model(x).sum().detach()

        steps = [step, shrink, lambda x, model=model: model(x).sum().detach()]
        steps = [xs.compile(one) for one in steps] if device == "jax" else steps
        found = []
        for number, batch in enumerate(batches(9)):
            found.append(steps[number % 3](batch.abs().to(device)).cpu())
            if number == 5:
                metrics.reset()
        assert metrics.counters()["copies"] == metrics.counters()["captures"] == 0
        if device == "jax":
            assert {type(p._storage) for p in model.parameters()} == {OwnedStorage}
        results.append([*found, *(p.detach().cpu() for p in model.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_threads_that_read_while_a_step_runs():
    model, _, step = trainer()
    run = xs.compile(step)
    for batch in batches(3):
        run(batch.to("jax"))
    done, faults = threading.Event(), []

    def read():
        while not done.is_set():
            values = [p._storage.value for p in model.parameters()]
            faults.extend(one for one in values if one.array is None)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for batch in batches(10):
            run(batch.to("jax"))
    finally:
        done.set()
        for reader in readers:
            reader.join(30)
    want_model, _, want = trainer("cpu")
    for batch in (*batches(3), *batches(10)):
        want(batch)
    assert not faults
    for p, q in zip(model.parameters(), want_model.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("looked_at", [False, True])
def test_memory_goes_with_its_tensors(looked_at):
    model, optimizer, step = trainer()
    run = xs.compile(step)
    for batch in batches(3):
        run(batch.to("jax"))
    weight, (bias, *_) = model[0].weight.detach(), [p.detach() for p in model[2:].parameters()]
    values = [weight._storage.value, bias._storage.value] if looked_at else []
    momentum = [weakref.ref(p) for state in optimizer.state.values() for p in state.values()]
    del model, optimizer, step, run, values
    gc.collect()
    assert not any(one() is not None for one in momentum)
    left = [weakref.ref(tensor._storage.value.array) for tensor in (weight, bias)]
    gc.disable()
    try:
        del weight
        assert left[0]() is None and left[1]() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_step_has_read_goes_with_the_step_without_a_collection(count):
    class Box:
        pass

    def made():
        box = Box()
        box.weights = [torch.ones(4, device="jax") for _ in range(count)]

        def step(x):
            for weight in box.weights:
                weight.add_(x)
            return box.weights[0].sum()

        run = xs.compile(step)
        for _ in range(3):
            run(torch.ones(4, device="jax"))
        return box, run

    box, run = made()
    seen = [weakref.ref(one) for one in (box, run.last, *run.last.guards)]
    gc.collect()
    gc.disable()
    try:
        del box, run
        assert [one() for one in seen] == [None] * 4
    finally:
        gc.enable()
