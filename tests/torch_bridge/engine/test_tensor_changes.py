"""A replay looks at its tensors only after one was changed: whatever changes one is heard."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording.tensor_changes import changes
from tests.torch_bridge.engine.on_both import around
from tests.torch_bridge.engine.spelled_calls import calls, outcome


def leaf(device: str = "jax") -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(4.0).to(device))


CHANGES = """
    setattr(w, "data", ones(4)); w.data.set_(ones(4)); setattr(w, "requires_grad", False)
    w.requires_grad_(False); w.detach_(); holding(w).requires_grad_(False)
    setattr(w, "grad", ones(4)); delattr(w, "grad"); w.register_hook(lambda gradient: gradient * 3)
    w.register_post_accumulate_grad_hook(halved); setattr(w, "frozen", True)
    vars(w).update(frozen=True); setattr(w, "__dict__", {**vars(w), "frozen": True})
    torch.utils.swap_tensors(w, leaf(d)); holding(w).to(bfloat16)
"""


def holding(weight: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = weight
    return module


def halved(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.grad.mul_(0.5)


def changed(change: str, w: torch.Tensor, device: str) -> None:
    error = outcome(change, device, w=w, holding=holding, leaf=leaf, halved=halved)
    assert not isinstance(error, Exception), error


LOOKS = """
    w.requires_grad; w.detach().sum().item(); w.cpu(); (w * 2).sum(); w._backward_hooks
    torch.ones(3).to(d); w.sharding_spec
"""


def test_a_look_is_no_change():
    weight = leaf()
    before = changes.last
    for look in calls(LOOKS):
        changed(look, weight, "jax")
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


@pytest.mark.parametrize("change", calls(CHANGES))
def test_the_next_call_computes_what_torch_computes(change):
    found = {}
    for device in ("cpu", "jax"):
        weight = leaf(device)
        step = _trained(weight)
        run = xs.compile(step) if device == "jax" else step
        x = torch.full((4,), 0.5, device=device)
        losses = [float(run(x)) for _ in range(3)]
        before = changes.last
        changed(change, weight, device)
        assert device == "cpu" or changes.last is not before
        losses += [float(run(x)) for _ in range(2)]
        found[device] = losses, weight.detach().cpu()
    (ours, after), (theirs, wanted) = found["jax"], found["cpu"]
    assert after.dtype == wanted.dtype
    tolerance = 1e-6 if after.dtype == torch.float32 else 2e-2
    assert ours == pytest.approx(theirs, rel=tolerance)
    torch.testing.assert_close(after, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def trained():
    weight = leaf()
    run = xs.compile(_trained(weight))
    x = torch.full((4,), 0.5, device="jax")
    for _ in range(4):
        run(x)
    return weight, lambda: run(x)


def test_a_gradient_that_came_from_elsewhere_is_refused_or_seen(trained):
    weight, run = trained
    result = (weight + 1).sum()  # a graph from before
    run()
    with pytest.raises(RuntimeError, match="left out"):
        result.backward()
    run()
    with pytest.raises(RuntimeError, match="left out"):
        (weight * 2).sum().backward()
    assert weight.grad is None  # looked at: the next backward is welcome
    (weight * 2).sum().backward()
    before = weight.detach().cpu()
    run()
    gradient = 2 * 0.25 * before
    torch.testing.assert_close(weight.detach().cpu(), before - 0.5 * gradient)


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
    weight = leaf()
    weight.frozen = True
    assert {"_storage", "frozen"} <= vars(weight).keys() and "frozen" in dir(weight)
    vars(weight)["frozen"] = False
    assert weight.frozen is False


TURNS = """
    w.t_(); w.transpose_(0, 1); w.swapaxes_(0, 1); w.as_strided_((3, 3), (0, 1))
    w.as_strided_((2, 3), (3, 1), 3); w.resize_(2, 3); w.set_(w.t()); w.unsqueeze_(0)
    setattr(w, "data", w.data.t()); setattr(w, "data", w.data[1:])
    torch.utils.swap_tensors(w, w.t().clone().t())
"""


@pytest.mark.parametrize(
    ("turn", "is_view"), list(zip(calls(TURNS), [False, True] * 6, strict=False))
)
def test_a_tensor_that_views_its_memory_in_another_way_is_seen(turn, is_view):
    def make(device):
        memory = torch.arange(9.0).reshape(3, 3).to(device)
        return holding(memory[:] if is_view else memory)

    def step(model, x):
        return (model.weight @ x).sum(-2)

    (wanted, _), (results, _) = around(
        make,
        step,
        lambda model: changed(turn, model.weight, model.weight.device.type),
        torch.arange(9.0).reshape(3, 3),
    )
    assert results == wanted


ASKED = {
    "w.size(0)": 'setattr(w, "data", ones(7))',
    "len(w)": "w.resize_(2)",
    "1.0 + (w.dtype == float32)": 'setattr(w, "data", w.data.to(bfloat16))',
    "1.0 + w.requires_grad": "w.requires_grad_()",
    "2.0 - w.requires_grad": "w.mul_(ones(4, requires_grad=True))",
    "1.0 + (w.grad is None)": 'setattr(w, "grad", torch.ones_like(w))',
    "w.stride(0)": "w.as_strided_((2,), (2,))",
    "w.numel()": "w.as_strided_((2,), (2,))",
    "w.dim()": "w.unsqueeze_(0)",
    "1.0 + w.is_contiguous()": "w.as_strided_((2,), (2,))",
    "1.0 + w.is_leaf": "w.mul_(ones(4, requires_grad=True))",
    'getattr(w, "factor", 1.0)': 'setattr(w, "factor", 3.0)',
    "2.0 if w._backward_hooks else 1.0": "w.requires_grad_().register_hook(print)",
}


@pytest.mark.parametrize(("ask", "where"), list(zip(ASKED, ["jax", "cpu"] * 7, strict=False)))
def test_what_a_step_asks_of_a_tensor_that_it_does_not_compute_with(ask, where):
    read = eval(f"lambda w: {ask}", {"float32": torch.float32})

    def make(device):
        return holding(torch.arange(4.0).to(where if device == "jax" else "cpu"))

    (wanted, _), (results, _) = around(
        make,
        lambda model, x: x * read(model.weight),
        lambda model: changed(ASKED[ask], model.weight, model.weight.device.type),
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
