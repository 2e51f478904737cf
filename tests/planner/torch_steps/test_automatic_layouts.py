"""`use_spmd(auto=True)`, `auto_policy` and FSDPv2: the first compiled step finds the layouts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P, ShardingError
from isoshard.core.runtime import metrics
from isoshard.planner.plan_search.searching import search
from isoshard.torch_bridge.spmd import auto_policy, unplanned_steps
from isoshard.torch_bridge.spmd.unplanned_steps import UnplannedWarning
from isoshard.torch_xla_bridge.torch_xla import runtime as xr
from isoshard.torch_xla_bridge.torch_xla import torch_xla
from isoshard.torch_xla_bridge.torch_xla.debug import metrics as met
from isoshard.torch_xla_bridge.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)

ROWS, WIDTH = 16, 64
"""So few rows that weights are not worth copying to each device."""


class Mlp(torch.nn.Module):
    """Two wide layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 8 * WIDTH), torch.nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def two_layers(seed=0):
    torch.manual_seed(seed)
    return Mlp()


def batches(count=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def training(model, compiled=xs.compile):
    """A compiled step, and its optimizer."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        adam.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        adam.step()
        return loss

    return compiled(step), adam


def losses(step):
    return [step(x.to("jax")).item() for x in batches()]


@pytest.fixture(scope="module")
def replicated():
    """What a run without any mesh gives."""
    return losses(training(two_layers().to("jax"))[0])


@pytest.fixture
def auto(monkeypatch, counted):
    """Automatic mode, which ends with the test."""
    for name in ("XLA_USE_SPMD", "XLA_AUTO_SPMD"):
        monkeypatch.setenv(name, "0")
    xr.use_spmd(auto=True)
    yield counted
    xs.set_global_mesh(None)
    unplanned_steps.compiled()


def specs_of(model):
    return {name: parameter.partition_spec for name, parameter in model.named_parameters()}


def test_the_first_call_of_a_step_lays_everything_out(auto, replicated):
    assert "plan: none so far, as no step was compiled; wrap it" in metrics.report()
    model = two_layers().to("jax")
    step, adam = training(model)
    assert xs.auto_plan(model) is None
    assert losses(step) == pytest.approx(replicated, rel=1e-5)
    searched = xs.auto_plan(model)
    assert searched.mesh.size == 8 and "not mesh" in str(searched)
    assert specs_of(model) == searched.plan.resolve(model, searched.mesh, strict=True).specs
    assert any(specs_of(model).values())
    assert len(model.up.weight.local_shards) == 8
    for parameter in model.parameters():
        assert adam.state[parameter]["exp_avg"].partition_spec == parameter.partition_spec
    assert len(step.replays) == 1 and auto("plans.found") == 1
    assert auto("plans.laid_out") == 4
    assert auto("plans.laid_out_bytes") == sum(parameter.nbytes for parameter in model.parameters())
    assert met.counter_value("CompileWithAutoSharding") >= 1
    report = metrics.report()
    assert "4 of 4 tensors laid out by what was found in" in report
    assert "isoshard.torch_bridge.auto_plan(model) says it  (test_automatic_layouts.py:" in report
    assert "none so far" not in report
    again = search(training(two_layers())[0], (batches()[0],), searched.mesh.size)
    assert (again.plan, again.mesh) == (searched.plan, searched.mesh)
    assert collectives.find(xs.program_text(step))


def test_marks_are_kept_and_their_mesh_is_used(auto, replicated):
    mesh = xs.Mesh(range(8), (2, 4), ("rows", "columns"))
    model = two_layers().to("jax")
    xs.mark_sharding(model.up.weight, mesh, (None, "columns"))
    xs.mark_sharding(model.down.bias, mesh, (None,))
    step, _ = training(model)
    x = xs.mark_sharding(batches()[0].to("jax"), mesh, ("rows", None))
    assert step(x).item() == pytest.approx(replicated[0], rel=1e-5)
    searched = xs.auto_plan(model)
    assert searched.mesh == mesh.get_jax_mesh()
    assert searched.plan.rules[:2] == (("up.weight", P(None, "columns")), ("down.bias", None))
    assert dict(searched.plan.inputs)["x"] == P("rows")
    assert model.up.weight.partition_spec == P(None, "columns")
    assert model.down.bias.partition_spec == P() and x.partition_spec == P("rows")
    assert auto("plans.laid_out") == 2  # up.bias and down.weight


def test_the_mesh_of_the_environment_or_marks_on_several_which_are_an_error(auto, monkeypatch):
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "4,2")
    small = torch.nn.Linear(64, 64).to("jax")
    training(small)[0](torch.ones(16, 64, device="jax"))
    assert dict(xs.auto_plan(small).mesh.shape) == {"0": 4, "1": 2}
    monkeypatch.delenv("XLA_AUTO_SPMD_MESH")
    model = two_layers().to("jax")
    xs.mark_sharding(model.up.weight, xs.Mesh(range(8), (2, 4), ("x", "y")), ("x", None))
    xs.mark_sharding(model.down.weight, xs.get_1d_mesh("z"), ("z", None))
    message = r"up.weight is marked on mesh \(x=2, y=4\), and down.weight on mesh \(z=8\). Mark ev"
    with pytest.raises(ShardingError, match=message):
        training(model)[0](batches()[0].to("jax"))


def test_auto_policy_lays_out_by_its_rule_and_then_by_the_plan(counted):
    """A model that nobody asked about stays as it is."""
    mesh = xs.Mesh(range(8), (8,), ("model",))
    plain = two_layers(), torch.nn.Linear(WIDTH, WIDTH)
    student = xs.xla_distribute_module(two_layers(), mesh, auto_policy)
    teacher = copy.deepcopy(plain[1]).to("jax")
    xs.mark_sharding(teacher.weight, mesh, (None, "model"))
    assert specs_of(student)["up.weight"] == P("model") == specs_of(student)["down.bias"]

    def distilled(student, teacher):
        sgd = torch.optim.SGD(student.parameters(), lr=0.1)

        def step(x):
            sgd.zero_grad()
            with torch.no_grad():
                expected = teacher(x)
            loss = (student(x) - expected).square().mean()
            loss.backward()
            sgd.step()
            return loss

        return step

    step, expected = xs.compile(distilled(student, teacher)), distilled(*plain)
    assert losses(step) == pytest.approx([expected(x).item() for x in batches()], rel=1e-5)
    searched = xs.auto_plan(student)
    assert searched.mesh == mesh.get_jax_mesh() and counted("plans.laid_out") == 4
    assert specs_of(student) == searched.plan.resolve(student, searched.mesh).specs
    assert specs_of(student)["down.bias"] == P()  # the plan keeps what is small whole
    assert teacher.weight.partition_spec == P(None, "model")
    assert xs.auto_plan(teacher) is None
    other = two_layers().to("jax")
    training(other)[0](batches()[0].to("jax"))
    assert xs.auto_plan(other) is None and counted("plans.found") == 1


def test_fsdp_of_an_automatic_script(auto, replicated):
    model = FSDPv2(two_layers())
    assert specs_of(model)["_orig_module.up.weight"] == P("fsdp")
    step, _ = training(model, torch_xla.compile)
    assert losses(step) == pytest.approx(replicated, rel=1e-5)
    searched = xs.auto_plan(model)
    assert xs.auto_plan(model._orig_module.up) is searched
    assert dict(searched.mesh.shape) == {"fsdp": 8}
    assert specs_of(model) == searched.plan.resolve(model, searched.mesh, strict=True).specs
    assert specs_of(model) != {"_orig_module.up.weight": P("fsdp")}


def test_an_evaluating_step_keeps_the_plan_of_training_but_not_the_reverse(auto, monkeypatch):
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "8")
    model = two_layers().to("jax")
    evaluate = xs.compile(lambda x: model(x).mean())
    x = batches()[0].to("jax")
    first = evaluate(x).item()
    for_evaluation = xs.auto_plan(model)
    step, _ = training(model)
    step(batches()[0].to("jax"))
    for_training = xs.auto_plan(model)
    assert for_training is not for_evaluation and auto("plans.found") == 2
    assert specs_of(model) == for_training.plan.resolve(model, for_training.mesh).specs
    again = xs.compile(lambda x: model(x).mean())
    assert again(batches()[0].to("jax")).item() != first
    assert xs.auto_plan(model) is for_training and auto("plans.found") == 2


def test_a_batch_that_does_not_divide_is_replicated(auto, monkeypatch):
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "8")
    model = torch.nn.Linear(64, 64).to("jax")
    step, _ = training(model)
    x = torch.ones(8192, 64, device="jax")
    step(x)
    assert x.partition_spec == P("0")
    odd = torch.ones(13, 64, device="jax")
    want = (model(odd) - 1).square().mean().item()
    assert step(odd).item() == pytest.approx(want, rel=1e-5)
    assert odd.partition_spec in (None, P())


def test_a_step_with_a_branch_on_a_value_warns_and_trains(auto, replicated):
    model = two_layers().to("jax")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @torch_xla.compile
    def step(x):
        adam.zero_grad()
        loss = (model(x) - 1).square().mean()
        if loss.item() > 0:
            loss.backward()
        adam.step()
        return loss

    with pytest.warns(
        UnplannedWarning,
        match=r"py:\d+: automatic sharding cannot plan this step: .*the step needs the value of a",
    ):
        got = step(batches()[0].to("jax")).item()
    assert got == pytest.approx(replicated[0], rel=1e-5)
    assert xs.auto_plan(model) is None and not any(filter(None, specs_of(model).values()))
    assert "plan: none: " in metrics.report() and "a step that is planned has no data" in (
        metrics.report()
    )


def test_a_step_without_a_module_warns(auto):
    weight = torch.ones(8, 8, device="jax")
    step = xs.compile(lambda x: x @ weight)
    with pytest.warns(UnplannedWarning, match=r"it reads no module with parameters"):
        assert step(torch.ones(8, 8, device="jax")).sum().item() == 512
    first, second = two_layers().to("jax"), two_layers(1).to("jax")
    step = xs.compile(lambda x: (first(x) - second(x)).mean())
    with pytest.warns(UnplannedWarning, match=r"first and second have tensors of the same names"):
        step(batches()[0].to("jax"))


def test_training_without_a_compiled_step_warns_once(auto):
    model = two_layers().to("jax")
    step, _ = training(model, lambda function: function)
    with pytest.warns(UnplannedWarning, match=r"test_automatic_layouts.py:\d+: use_spmd\(auto=Tr"):
        step(batches()[0].to("jax"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batches()[1].to("jax"))
    assert "wrap it in torch_xla.compile(step)" in metrics.report()


def test_present_state_and_gradients_move_with_their_parameters(auto, monkeypatch):
    monkeypatch.setenv("XLA_AUTO_SPMD_MESH", "8")
    model = two_layers().to("jax")
    adam = training(model, lambda function: function)[1]
    monkeypatch.setenv("XLA_AUTO_SPMD", "0")
    unplanned_steps.compiled()
    adam.zero_grad()
    (model(batches()[0].to("jax")) - 1).square().mean().backward()
    adam.step()  # state on one device
    monkeypatch.setenv("XLA_AUTO_SPMD", "1")
    before = {parameter: adam.state[parameter]["exp_avg"].cpu() for parameter in model.parameters()}
    adam.param_groups[0]["lr"] = 0.0

    @xs.compile
    def step(x):
        (model(x) - 1).square().mean().backward()  # adds to the gradients that are there
        adam.step()

    step(batches()[1].to("jax"))
    assert auto("plans.laid_out") == 4 * 4  # parameter, gradient, two moments
    for parameter in model.parameters():
        state = adam.state[parameter]["exp_avg"]
        assert state.partition_spec == parameter.partition_spec == parameter.grad.partition_spec
        assert not torch.equal(state.cpu(), before[parameter])
