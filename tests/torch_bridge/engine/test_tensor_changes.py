"""A replay looks at its tensors only after one was changed: whatever changes one is heard."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording.tensor_changes import changes
from tests.torch_bridge.engine.on_both import around


def _leaf(device: str = "jax") -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(4.0).to(device))


def _swapped(weight):
    torch.utils.swap_tensors(weight, _leaf(weight.device.type))


def _given_a_dict(weight):
    weight.__dict__ = {**vars(weight), "frozen": True}


def _written_through_a_dict(weight):
    vars(weight)["frozen"] = True


CHANGES = {
    "data": lambda weight: setattr(weight, "data", torch.ones(4, device=weight.device)),
    "data of another shape": lambda weight: setattr(
        weight, "data", torch.ones(2, device=weight.device)
    ),
    "set_": lambda weight: weight.data.set_(torch.ones(4, device=weight.device)),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "detach_": lambda weight: weight.detach_(),
    "module.requires_grad_": lambda weight: _holding(weight).requires_grad_(False),
    "grad": lambda weight: setattr(weight, "grad", torch.ones(4, device=weight.device)),
    "deleted grad": lambda weight: delattr(weight, "grad"),
    "register_hook": lambda weight: weight.register_hook(print),
    "post hook": lambda weight: weight.register_post_accumulate_grad_hook(print),
    "attribute": lambda weight: setattr(weight, "frozen", True),
    "vars": _written_through_a_dict,
    "__dict__": _given_a_dict,
    "swap_tensors": _swapped,
    "module.to": lambda weight: _holding(weight).to(torch.bfloat16),
}


def _holding(weight: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = weight
    return module


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_heard(change):
    weight = _leaf()
    before = changes.last
    change(weight)
    assert changes.last is not before


@pytest.mark.parametrize(
    "look",
    [
        lambda weight: weight.requires_grad,
        lambda weight: weight.detach().sum().item(),
        lambda weight: weight.cpu(),
        lambda weight: (weight * 2).sum(),
        lambda weight: weight._backward_hooks,
        lambda weight: torch.ones(3).to("jax"),
        lambda weight: weight.sharding_spec,
    ],
)
def test_a_look_is_none(look):
    weight = _leaf()
    before = changes.last
    look(weight)
    assert changes.last is before


def _trained(weight: torch.nn.Parameter):
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(x):
        optimizer.zero_grad()
        loss = (weight * x).square().sum() * (2.0 if getattr(weight, "frozen", False) else 1.0)
        if weight.requires_grad:
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


LATER = {
    **{name: change for name, change in CHANGES.items() if name != "data of another shape"},
    "register_hook": lambda weight: weight.register_hook(lambda gradient: gradient * 3),
    "post hook": lambda weight: weight.register_post_accumulate_grad_hook(_halved),
}


def _halved(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.grad.mul_(0.5)


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_the_next_call_computes_what_torch_computes(change):
    found = {}
    for device in ("cpu", "jax"):
        weight = _leaf(device)
        step = _trained(weight)
        run = xs.compile(step) if device == "jax" else step
        x = torch.full((4,), 0.5, device=device)
        losses = [float(run(x)) for _ in range(4)]
        change(weight)
        losses += [float(run(x)) for _ in range(3)]
        found[device] = losses, weight.detach().cpu()
    (ours, after), (theirs, wanted) = found["jax"], found["cpu"]
    assert after.dtype == wanted.dtype
    tolerance = 1e-6 if after.dtype == torch.float32 else 2e-2
    assert ours == pytest.approx(theirs, rel=tolerance)
    torch.testing.assert_close(after, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def trained():
    weight = _leaf()
    run = xs.compile(_trained(weight))
    x = torch.full((4,), 0.5, device="jax")
    for _ in range(4):
        run(x)
    return weight, lambda: run(x)


def test_a_replay_asks_nothing_while_nothing_changes(trained):
    weight, run = trained
    tensors = run.__closure__[0].cell_contents.last.guards[1]
    assert tensors._last is changes.last
    run()
    assert tensors._last is changes.last
    weight.sum().item()
    assert tensors.holds()


def test_a_gradient_that_came_from_elsewhere_is_refused_or_seen(trained):
    weight, run = trained
    with pytest.raises(RuntimeError, match="left out"):
        (weight * 2).sum().backward()
    assert weight.grad is None  # looked at: the next backward is welcome
    (weight * 2).sum().backward()
    before = weight.detach().cpu()
    run()
    gradient = 2 * 0.25 * before
    torch.testing.assert_close(weight.detach().cpu(), before - 0.5 * gradient)


def test_a_graph_from_before_is_refused_as_well(trained):
    weight, run = trained
    result = (weight + 1).sum()
    run()
    with pytest.raises(RuntimeError, match="left out"):
        result.backward()


def test_a_frozen_weight_that_is_written_learns_from_then_on():
    def trained(device: str) -> tuple[list[float], bool]:
        frozen = torch.nn.Parameter(torch.ones(3).to(device), requires_grad=False)
        free = torch.nn.Parameter(torch.full((3,), 2.0).to(device))

        def step(x):
            free.grad = None
            loss = (frozen * free * x).sum()
            loss.backward()
            with torch.no_grad():
                free.sub_(0.1 * free.grad)
            return loss.detach(), frozen.requires_grad

        run = xs.compile(step) if device == "jax" else step
        x = torch.ones(3, device=device)
        losses = [float(run(x)[0]) for _ in range(4)]
        frozen.mul_(free.detach().requires_grad_())
        loss, told = run(x)
        return [*losses, float(loss)], told

    (ours, told), (theirs, wanted) = trained("jax"), trained("cpu")
    assert ours == pytest.approx(theirs) and told is wanted is True


def test_a_tensor_shows_what_a_program_gave_it():
    weight = _leaf()
    weight.frozen = True
    assert {"_storage", "frozen"} <= vars(weight).keys() and "frozen" in dir(weight)
    vars(weight)["frozen"] = False
    assert weight.frozen is False


TURNS = {
    "t_": lambda weight: weight.t_(),
    "transpose_": lambda weight: weight.transpose_(0, 1),
    "swapaxes_": lambda weight: weight.swapaxes_(0, 1),
    "as_strided_": lambda weight: weight.as_strided_((3, 3), (0, 1)),
    "an offset": lambda weight: weight.as_strided_((2, 3), (3, 1), 3),
    "resize_": lambda weight: weight.resize_(2, 3),
    "set_": lambda weight: weight.set_(weight.t()),
    "data of a view": lambda weight: setattr(weight, "data", weight.data.t()),
    "data of a part": lambda weight: setattr(weight, "data", weight.data[1:]),
    "unsqueeze_": lambda weight: weight.unsqueeze_(0),
    "swap_tensors": lambda weight: torch.utils.swap_tensors(weight, weight.t().clone().t()),
}


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_a_tensor_that_views_its_memory_in_another_way_is_seen(turn, is_view):
    def make(device):
        memory = torch.arange(9.0).reshape(3, 3).to(device)
        return _holding(memory[:] if is_view else memory)

    def step(model, x):
        return (model.weight @ x).sum(-2)

    (wanted, _), (results, _) = around(
        make, step, lambda model: turn(model.weight), torch.arange(9.0).reshape(3, 3)
    )
    assert results == wanted


def _required(weight):
    return weight.requires_grad_()


ASKED = {
    "size": (lambda w: w.size(0), lambda w: setattr(w, "data", torch.ones(7, device=w.device))),
    "len": (len, lambda w: w.resize_(2)),
    "dtype": (
        lambda w: 1.0 if w.dtype == torch.float32 else 2.0,
        lambda w: setattr(w, "data", w.data.to(torch.bfloat16)),
    ),
    "requires_grad": (lambda w: 1.0 if w.requires_grad else 2.0, _required),
    "requires_grad by a write": (
        lambda w: 1.0 if w.requires_grad else 2.0,
        lambda w: w.mul_(torch.ones(4, device=w.device, requires_grad=True)),
    ),
    "grad": (
        lambda w: 1.0 if w.grad is None else 2.0,
        lambda w: setattr(w, "grad", torch.ones_like(w)),
    ),
    "stride": (lambda w: w.stride(0), lambda w: w.as_strided_((2,), (2,))),
    "numel": (lambda w: w.numel(), lambda w: w.as_strided_((2,), (2,))),
    "dim": (lambda w: w.dim(), lambda w: w.unsqueeze_(0)),
    "contiguous": (
        lambda w: 1.0 if w.is_contiguous() else 2.0,
        lambda w: w.as_strided_((2,), (2,)),
    ),
    "leaf": (
        lambda w: 1.0 if w.is_leaf else 2.0,
        lambda w: w.mul_(torch.ones(4, device=w.device, requires_grad=True)),
    ),
    "attribute": (lambda w: getattr(w, "factor", 1.0), lambda w: setattr(w, "factor", 3.0)),
    "hooks": (
        lambda w: 2.0 if w._backward_hooks else 1.0,
        lambda w: w.requires_grad_().register_hook(print),
    ),
}


@pytest.mark.parametrize("where", ["jax", "cpu"])
@pytest.mark.parametrize(("ask", "change"), ASKED.values(), ids=ASKED)
def test_what_a_step_asks_of_a_tensor_that_it_does_not_compute_with(ask, change, where):
    def make(device):
        return _holding(torch.arange(4.0).to(where if device == "jax" else "cpu"))

    (wanted, _), (results, _) = around(
        make,
        lambda model, x: x * ask(model.weight),
        lambda model: change(model.weight),
        torch.ones(3),
    )
    assert results == wanted
    assert wanted[0] != wanted[-1]


def test_a_result_that_retains_its_gradient_from_now_on_is_seen():
    (wanted, _), (results, _) = around(
        lambda device: [torch.ones(3, device=device, requires_grad=True) * 2],
        lambda kept, x: x * (2.0 if kept[0].retains_grad else 3.0),
        lambda kept: kept[0].retain_grad(),
        torch.ones(3),
    )
    assert results == wanted and wanted[0] != wanted[-1]
