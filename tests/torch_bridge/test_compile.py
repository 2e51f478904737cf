"""Compiled steps: the same results as plain ones, no Python in a replay, nothing frozen unseen."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh, metrics

functional = torch.nn.functional


class Net(torch.nn.Module):
    """A small model with the things that matter to a replay: dropout, BatchNorm, a call count."""

    def __init__(self, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(1)
    return [
        (
            torch.from_numpy(rng.standard_normal((rows, 6)).astype(np.float32)),
            torch.from_numpy(rng.standard_normal((rows, 4)).astype(np.float32)),
        )
        for _ in range(count)
    ]


def make_step(model, optimizer, *, clip: float | None = None, parts: int = 1) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = functional.mse_loss(model(a), b) / parts
            loss.backward()
            total = total + loss.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return total

    return step


def train(
    device: str,
    make_optimizer: Callable[..., Any],
    *,
    compiled: bool = False,
    schedule: bool = False,
    steps: int = 6,
    seed: int = 5,
    clip: float | None = None,
    parts: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the final state of a short training run."""
    model = net(**options).to(device)
    optimizer = make_optimizer(model.parameters())
    step = make_step(model, optimizer, clip=clip, parts=parts)
    step = xs.compile(step) if compiled else step
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if schedule else None
    torch.manual_seed(seed)
    losses = []
    for x, y in batches(steps):
        losses.append(step(x.to(device), y.to(device)))
        if scheduler:
            scheduler.step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return [loss.item() for loss in losses], state


def same(got: Any, want: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=rtol)
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=rtol, atol=1e-6, err_msg=name)


# --- The same results ----------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "groups": lambda p: _groups(list(p)),
}


def _groups(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:2], "lr": 1e-3}, {"params": parameters[2:]}])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_a_schedule_gives_the_results_of_the_cpu(name):
    got = train("jax", OPTIMIZERS[name], compiled=True, schedule=True)
    same(got, train("cpu", OPTIMIZERS[name], schedule=True), rtol=1e-4)


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"parts": 2}, {"norm": True}], ids=str)
def test_clipping_accumulation_and_batch_norm_give_the_results_of_the_cpu(options):
    got = train("jax", OPTIMIZERS["momentum"], compiled=True, **options)
    same(got, train("cpu", OPTIMIZERS["momentum"], **options), rtol=1e-4)


def test_dropout_draws_what_the_plain_step_draws():
    plain = train("jax", OPTIMIZERS["sgd"], dropout=0.5)
    same(train("jax", OPTIMIZERS["sgd"], dropout=0.5, compiled=True), plain)


def test_random_numbers_advance_from_call_to_call_and_follow_the_seed():
    dropout = torch.nn.Dropout(0.5)
    step = xs.compile(lambda x: dropout(x))
    x = torch.ones(64, device="jax")
    first = [step(x).tolist() for _ in range(4)]
    assert len({tuple(values) for values in first}) == 4
    torch.manual_seed(3)
    second = [step(x).tolist() for _ in range(2)]
    torch.manual_seed(3)
    assert [step(x).tolist() for _ in range(2)] == second


def test_a_step_on_a_mesh_is_one_program_and_keeps_layouts(counted):
    mesh = make_mesh((2, 4), ("x", "y"))
    plan = Plan({"first.weight": P("y", None), "last.weight": P(None, "y"), "*": P()})
    model = iso.shard(net(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = xs.compile(make_step(model, optimizer, clip=1.0))
    losses, compilations, executions = [], [], []
    for x, y in batches(5):
        losses.append(step(*(iso.shard(t, mesh, P("x", None)) for t in (x, y))))
        compilations.append(counted("compilations"))
        executions.append(counted("executions"))
    assert compilations[2:] == compilations[1:2] * 3
    assert np.diff(executions)[1:].tolist() == [1, 1, 1]
    assert iso.to_jax(model.first.weight).sharding.spec == P("y")
    assert iso.to_jax(optimizer.state[model.last.weight]["exp_avg"]).sharding.spec == P(None, "y")
    want = train("cpu", OPTIMIZERS["adamw"], steps=5, clip=1.0)[0]
    np.testing.assert_allclose([loss.item() for loss in losses], want, rtol=1e-4)


def test_a_replay_donates(counted):
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.Adam(model.parameters())))
    (x, y) = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
    before = counted("donated_bytes")
    step(x, y)
    assert counted("donated_bytes") - before >= 3 * 4 * sum(p.numel() for p in model.parameters())
    assert counted("copies") == 0


# --- Replays ------------------------------------------------------------------------------------


def test_replays_run_no_python_of_the_model():
    model = net().to("jax")
    calls = []
    plain = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @xs.compile
    def step(x, y):
        calls.append(1)
        return plain(x, y)

    x, y = (t.to("jax") for t in batches(1)[0])
    step(x, y), step(x, y)
    done = len(calls), model.calls
    losses = [step(x, y).item() for _ in range(3)]
    assert (len(calls), model.calls) == done
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3


def test_new_shapes_modes_and_hyperparameters_get_programs_of_their_own():
    model = net(dropout=0.5).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    step = xs.compile(make_step(model, optimizer))
    small, large = ([t.to("jax") for t in batches(1, rows)[0]] for rows in (8, 12))
    step(*small), step(*small)
    assert len(step.replays) == 1
    step(*large), step(*large)
    assert len(step.replays) == 2
    model.eval()
    assert step(*small).item() == step(*small).item()
    assert len(step.replays) == 3
    model.train()
    assert step(*small).item() != step(*small).item()
    assert len(step.replays) == 3
    optimizer.param_groups[0]["momentum"] = 0.9
    step(*small)
    assert len(step.replays) == 4
    optimizer.param_groups[0]["lr"] = 0.1
    step(*small)
    assert len(step.replays) == 4


def test_freezing_a_parameter_takes_effect():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    step(x, y), step(x, y)
    model.first.weight.requires_grad_(False)
    before = model.first.weight.tolist(), model.last.weight.tolist()
    step(x, y), step(x, y)
    assert model.first.weight.tolist() == before[0]
    assert model.last.weight.tolist() != before[1]


def test_nested_arguments_keywords_and_results():
    @xs.compile
    def step(inputs: dict[str, Any], scale: float = 1.0, *, extra: list[torch.Tensor]) -> Any:
        a, (b, name) = inputs["a"], inputs["b"]
        return {"sum": a + b * scale, "all": [extra[0] * 2, (a, name)], "none": None, "n": 3}

    def call(value: float, scale: float) -> Any:
        a, b = torch.full((2,), value, device="jax"), torch.ones(2, device="jax")
        got = step({"a": a, "b": (b, "label")}, scale=scale, extra=[b + 1])
        assert got["all"][1] == (a, "label") and got["all"][1][0] is a
        assert got["none"] is None and got["n"] == 3
        return got["sum"].tolist(), got["all"][0].tolist()

    for _ in range(2):
        assert call(1.0, 2.0) == ([3, 3], [4, 4])
        assert call(5.0, 2.0) == ([7, 7], [4, 4])
        assert call(5.0, 3.0) == ([8, 8], [4, 4])
    assert len(step.replays) == 2


def test_arguments_may_be_views_or_not_yet_computed():
    step = xs.compile(lambda x: (x * 2).sum())
    base = torch.arange(12.0).to("jax").reshape(3, 4)
    for _ in range(2):
        assert step(base[1]).item() == 2 * (4 + 5 + 6 + 7)
        assert step(base[2]).item() == 2 * (8 + 9 + 10 + 11)
        assert step(base.t()).item() == 2 * 66
        assert step((base + 1)[0]).item() == 2 * (1 + 2 + 3 + 4)


def test_the_same_tensor_twice_is_not_two_tensors():
    step = xs.compile(lambda a, b: a * 10 + b)
    one, two = torch.tensor([1.0]).to("jax"), torch.tensor([2.0]).to("jax")
    for _ in range(2):
        assert step(one, one).tolist() == [11]
        assert step(one, two).tolist() == [12]
        assert step(two, one).tolist() == [21]


def test_views_of_one_memory_are_not_views_of_two():
    def write_then_read(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(10)
        return b + 0

    step = xs.compile(write_then_read)
    for _ in range(2):
        base = torch.ones(2, 3).to("jax")
        assert step(base[0], base[0]).tolist() == [10, 10, 10]
        other = torch.ones(2, 3).to("jax")
        assert step(other[0], torch.ones(2, 3).to("jax")[0]).tolist() == [1, 1, 1]
        assert other.tolist() == [[10] * 3, [1] * 3]


def test_a_write_to_an_argument_reaches_the_caller():
    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        x[0].add_(5)
        return x.sum()

    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 2), value).to("jax")
        assert step(x).item() == 4 * value + 10
        assert x.tolist() == [[value + 5] * 2, [value] * 2]


def test_tensors_of_the_closure_are_read_and_written_anew():
    state = torch.zeros(3, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    one = torch.ones(3, device="jax")
    assert [step(one)[0].item() for _ in range(3)] == [2, 4, 6]
    state.fill_(10)
    assert step(one)[0].item() == 22
    assert state.tolist() == [11, 11, 11]


def test_loading_a_checkpoint_between_replays_takes_effect():
    def run(compiled: bool) -> list[float]:
        model = net().to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = make_step(model, optimizer)
        step = xs.compile(step) if compiled else step
        data = [[t.to("jax") for t in pair] for pair in batches(4)]
        losses = [step(*data[0]), step(*data[1])]
        weights = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        losses += [step(*data[2]), step(*data[3])]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        losses += [step(*data[2]), step(*data[3])]
        return [loss.item() for loss in losses]

    compiled = run(compiled=True)
    assert compiled[2:4] == pytest.approx(compiled[4:6], rel=1e-6)
    np.testing.assert_allclose(compiled, run(compiled=False), rtol=1e-5)


def _new_data(model: Net) -> None:
    model.first.weight.data = torch.zeros(16, 6, device="jax")


def _new_parameter(model: Net) -> None:
    model.first.weight = torch.nn.Parameter(torch.zeros(16, 6, device="jax"))


def _new_module(model: Net) -> None:
    model.first = torch.nn.Linear(6, 16, device="jax")
    torch.nn.init.zeros_(model.first.weight)


def _written(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.zero_()


def _loaded(model: Net) -> None:
    model.load_state_dict(model.state_dict() | {"first.weight": torch.zeros(16, 6)})


CHANGES = {f.__name__: f for f in (_new_data, _new_parameter, _new_module, _written, _loaded)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changed_between_replays_is_seen(name):
    model = net().to("jax")
    step = xs.compile(lambda x: model(x))
    x = batches(1)[0][0].to("jax")
    with torch.no_grad():
        before = [step(x).cpu() for _ in range(3)][-1]
        CHANGES[name](model)
        want = model(x).cpu()
        assert not torch.equal(before, want)
        for _ in range(2):
            torch.testing.assert_close(step(x).cpu(), want)


def test_training_goes_on_in_memory_that_replaced_a_parameters():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
    _new_data(model)
    for _ in range(2):
        step(x, y)
    assert model.first.weight.count_nonzero().item() > 0


def test_plain_work_between_replays_sees_their_results_and_is_seen():
    model = net().to("jax")
    plain = net()
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    want = make_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    x, y = batches(1)[0]
    for _ in range(4):
        step(x.to("jax"), y.to("jax")), want(x, y)
        with torch.no_grad():
            model.last.bias.mul_(0.5), plain.last.bias.mul_(0.5)
        torch.testing.assert_close(model(x.to("jax")).detach().cpu(), plain(x).detach())


HOLDERS = {
    "jax array": iso.to_jax,
    "jax arrays of the module": lambda t: iso.to_jax(t.detach()),
    "shards": lambda t: t.local_shards[0].data,
    "core shards": lambda t: iso.local_shards(t, framework="torch")[0].data,
    "cpu": lambda t: t.cpu(),
    "clone, computed": lambda t: _computed(t.clone()),
    "clone, recorded": lambda t: t.clone(),
    "copy": lambda t: torch.zeros_like(t).copy_(t),
    "sum, recorded": lambda t: t + 0,
    "deepcopy": lambda t: copy.deepcopy(t),
}


def _computed(t: torch.Tensor) -> torch.Tensor:
    xs.sync()
    return t


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_user_holds_of_a_parameter_stays_valid_across_replays(name):
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(2):
        step(x, y)
    want = model.first.weight.detach().cpu().numpy()
    held = HOLDERS[name](model.first.weight.detach())
    for _ in range(3):
        step(x, y)
        gc.collect()
    np.testing.assert_array_equal(np.asarray(held), want)
    assert not np.array_equal(model.first.weight.detach().cpu(), want)


def test_results_stay_valid_across_replays():
    state = torch.zeros(2, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> Any:
        state.add_(x)
        return state.clone(), x * 2

    x = torch.ones(2, device="jax")
    held = [step(x) for _ in range(4)]
    assert [copied.tolist() for copied, _ in held] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0)]
    assert [doubled.tolist() for _, doubled in held] == [[2.0, 2.0]] * 4


def test_a_returned_alias_of_state_is_the_state():
    state = torch.zeros(2, device="jax")

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state.detach()

    held = [step(torch.ones(2, device="jax")) for _ in range(4)]
    assert [alias.tolist() for alias in held] == [[4.0, 4.0]] * 4


def test_buffers_of_batch_norm_count_and_average():
    def run(device: str) -> Any:
        model = net(norm=True).to(device)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = xs.compile(step) if device == "jax" else step
        for x, y in batches(5):
            step(x.to(device), y.to(device))
        return model.norm

    got, want = run("jax"), run("cpu")
    assert got.num_batches_tracked.item() == want.num_batches_tracked.item() == 5
    torch.testing.assert_close(got.running_mean.cpu(), want.running_mean)
    torch.testing.assert_close(got.running_var.cpu(), want.running_var)


def test_step_counts_of_optimizers_advance():
    model = net().to("jax")
    optimizer = torch.optim.Adam(model.parameters())
    step = xs.compile(make_step(model, optimizer))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(5):
        step(x, y)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_gradients_stay_inside():
    model = net().to("jax")
    step = xs.compile(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x, y = (t.to("jax") for t in batches(1)[0])
    for _ in range(3):
        step(x, y)
        assert all(p.grad is None for p in model.parameters())


def test_a_step_without_gradients_or_state():
    step = xs.compile(lambda x: torch.softmax(x, -1))
    x = torch.tensor([0.0, 0.0]).to("jax")
    assert [step(x).tolist() for _ in range(3)] == [[0.5, 0.5]] * 3


def test_evaluation_under_no_grad_is_a_program_of_its_own():
    model = net().to("jax")
    step = xs.compile(lambda x: model(x).sum())
    x = batches(1)[0][0].to("jax")
    want = model(x).sum().item()
    for _ in range(2):
        with torch.no_grad():
            assert step(x).item() == pytest.approx(want, rel=1e-5)


def test_a_method_and_a_trainer_object_can_be_compiled():
    class Trainer:
        def __init__(self):
            self.model = net().to("jax")
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return make_step(self.model, self.optimizer)(x, y)

    trainer = Trainer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 6)
    step = xs.compile(trainer.step)
    losses = []
    for x, y in batches(6):
        losses.append(step(x.to("jax"), y.to("jax")))
        schedule.step()
    want = train("cpu", OPTIMIZERS["adamw"], schedule=True)[0]
    np.testing.assert_allclose([loss.item() for loss in losses], want, rtol=1e-4)


def test_program_text_and_memory_of_a_compiled_step():
    step = xs.compile(lambda x: x @ x)
    with pytest.raises(RuntimeError, match=r"not been captured yet: call it twice"):
        xs.program_text(step)
    for _ in range(2):
        step(torch.ones(4, 4, device="jax"))
    assert "dot" in xs.program_text(step)
    assert xs.memory_analysis(step).output_size_in_bytes >= 64


# --- What a replay would not repeat is refused ---------------------------------------------------


def _item(model, optimizer, x):
    return x * model(x).sum().item()


def _branch(model, optimizer, x):
    return x if model(x).sum() > 0 else -x


def _print(model, optimizer, x):
    print(model(x))
    return x


def _mask(model, optimizer, x):
    return x[x > 0]


def _outside_upload(model, optimizer, x):
    return x + OUTSIDE.to("jax")


def _outside_copy(model, optimizer, x):
    return torch.zeros(8, 6, device="jax").copy_(OUTSIDE)


def _host_random(model, optimizer, x):
    return x + torch.randn(6).to("jax")


def _host_permutation(model, optimizer, x):
    return x[torch.randperm(8).to("jax")]


def _scheduler(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
    return x + 0


def _rate_in_python(model, optimizer, x):
    return x if optimizer.param_groups[0]["lr"] > 0.01 else -x


OUTSIDE = torch.ones(8, 6)
REFUSED = {
    "item": (_item, r"test_compile.py:\d+.*value of a tensor.*[Rr]eturn the tensor"),
    "branch": (_branch, r"test_compile.py:\d+.*value of a tensor.*torch\.where"),
    "print": (_print, r"value of a tensor"),
    "mask": (_mask, r"value of a tensor"),
    "outside upload": (_outside_upload, r"CPU tensor of shape \(8, 6\).*pass it as an argument"),
    "outside copy": (_outside_copy, r"CPU tensor of shape \(8, 6\).*pass it as an argument"),
    "host random": (_host_random, r"(?i)random|CPU tensor"),
    "host permutation": (_host_permutation, r"(?i)random|CPU tensor"),
    "scheduler": (_scheduler, r"scheduler.*after the compiled step"),
    "rate in python": (_rate_in_python, r"compared in a Python condition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_a_replay_could_not_repeat_is_refused(name):
    body, message = REFUSED[name]
    model = net().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = xs.compile(lambda x: body(model, optimizer, x))
    x = batches(1)[0][0].to("jax")
    with pytest.raises(xs.CaptureError, match=message):
        for _ in range(3):
            step(x)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.isfinite(model(x).cpu()).all()
    assert xs.compile(lambda x: x * 2)(x).shape == x.shape


def _fail_late(message: str, make: Callable[..., None]) -> None:
    """Training works, step by step, after a compiled step failed once its updates were recorded."""
    model = net().to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = make_step(model, optimizer)
    data = [[t.to("jax") for t in pair] for pair in batches(2)]
    plain(*data[0])
    before = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}

    @xs.compile
    def step(x, y):
        loss = plain(x, y)
        make(loss)
        return loss

    with pytest.raises((xs.CaptureError, ZeroDivisionError), match=message):
        for _ in range(2):
            step(*data[1])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for tensor in model.parameters():
        assert torch.isfinite(tensor.detach().cpu()).all()
        assert tensor.grad is None or torch.isfinite(tensor.grad.cpu()).all()
    assert set(before) == {name for name, _ in model.named_parameters()}
    assert np.isfinite(plain(*data[1]).item())
    again = xs.compile(plain)
    assert np.isfinite([again(*data[1]).item() for _ in range(3)]).all()


def test_a_model_is_usable_after_a_value_was_refused():
    _fail_late(r"value of a tensor", lambda loss: loss.item())


def test_a_model_is_usable_after_an_error_of_the_user():
    def fail(loss: torch.Tensor) -> None:
        raise ZeroDivisionError("by the user")

    _fail_late(r"by the user", fail)


def test_a_model_is_usable_after_a_tensor_escaped():
    kept: list[torch.Tensor] = []
    _fail_late(r"outlive it without being returned", lambda loss: kept.append(loss * 2))


def test_a_refused_step_leaves_the_parameters_as_they_were():
    model = net().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = make_step(model, optimizer)
    before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    step = xs.compile(lambda x, y: plain(x, y).item())
    with pytest.raises(xs.CaptureError, match=r"value of a tensor"):
        step(*(t.to("jax") for t in batches(1)[0]))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name])


def test_a_cpu_argument_is_refused():
    step = xs.compile(lambda x: x * 2)
    with pytest.raises(xs.CaptureError, match=r"CPU tensor of shape \(2,\) as an argument.*'jax'"):
        step(torch.ones(2))


def test_an_unhashable_argument_is_refused():
    step = xs.compile(lambda x, how: x * 2)
    with pytest.raises(xs.CaptureError, match=r"type ndarray, which is neither"):
        step(torch.ones(2, device="jax"), np.ones(2))


def test_an_escaping_tensor_is_refused():
    history = []

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        history.append((x * 3).sum())
        return x + 1

    x = torch.ones(2, device="jax")
    step(x)
    with pytest.raises(xs.CaptureError, match=r"outlive it without being returned"):
        step(x)
    assert history[0].item() == 6


def test_a_constant_made_inside_is_no_upload_from_outside():
    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0], device="jax")
        mask = torch.ones(2, 2).tril().to("jax")
        return (x * weights) @ mask + torch.arange(2, device="jax")

    x = torch.ones(2, device="jax")
    assert [step(x).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3


def test_a_compiled_step_inside_another_or_under_jax_is_refused():
    inner = xs.compile(lambda x: x * 2)
    f = iso.jax_function(lambda x: inner(x))
    import jax

    with pytest.raises(xs.CaptureError, match=r"while JAX traces"):
        jax.jit(f)(jax.numpy.ones(2))


def test_metrics_name_the_compiled_step(counted):
    @xs.compile
    def my_step(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    assert my_step.__name__ == "my_step"
    for _ in range(3):
        my_step(torch.ones(3).to("jax"))
    assert counted("compilations") == 1
    assert "test_compile.py" in metrics.compilations()[0].where
