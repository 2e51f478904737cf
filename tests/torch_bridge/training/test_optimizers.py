"""Every optimizer of torch, in every form, against the CPU; lazily and compiled."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.training.test_training import draw

Options = dict[str, Any]


STEPS = 3
X, Y = draw(8, 4), draw(8, 3, seed=1)

# Each optimizer with hyperparameters that reach its less trodden branches.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Options]] = {
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2, "weight_decay": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05, "weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "weight_decay": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05, "betas": (0.9, 0.7), "weight_decay": 0.01}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
}
FORMS: dict[str, Options] = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"foreach": False, "capturable": True},
    "capturable-foreach": {"foreach": True, "capturable": True},
}


def accepts(cls: type, options: Iterable[str]) -> bool:
    return set(options) <= set(inspect.signature(cls).parameters)


def forms_of(name: str) -> list[str]:
    """The forms that an optimizer has."""
    return [form for form, options in FORMS.items() if accepts(OPTIMIZERS[name][0], options)]


class Model(torch.nn.Module):
    def __init__(self, device: str):
        super().__init__()
        self.weight = torch.nn.Parameter(draw(4, 3, seed=2).to(device))
        self.bias = torch.nn.Parameter(draw(3, seed=3).to(device))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.weight + self.bias) - y).square().mean()


def stepper(
    make: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer], device: str
) -> tuple[Model, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    model = Model(device)
    optimizer = make(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


def close(got: torch.nn.Module, want: torch.nn.Module, rtol: float = 1e-4, where: str = "") -> None:
    for (name, g), (_, w) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        describe = lambda text, name=name: f"{where} {name}: {text}"  # noqa: E731
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol, atol=1e-5, msg=describe)


@functools.cache
def on_the_cpu(name: str) -> Model:
    cls, options = OPTIMIZERS[name]
    model, step = stepper(lambda parameters: cls(parameters, **options), "cpu")
    for _ in range(STEPS):
        step(X, Y)
    return model


Case = tuple[str, str]


def together(
    cases: Iterable[Case],
) -> tuple[dict[Case, Model], Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]]:
    """A model for each optimizer and form, and a step of them all."""

    def make(name: str, form: str) -> Any:
        cls, options = OPTIMIZERS[name]
        return stepper(lambda p: cls(p, **options, **FORMS[form]), "jax")

    made = {case: make(*case) for case in cases}
    models = {case: model for case, (model, _) in made.items()}
    return models, lambda x, y: [step(x, y) for _, step in made.values()]


def test_no_optimizer_of_torch_is_left_out():
    classes = {c for c in vars(torch.optim).values() if isinstance(c, type)}
    elsewhere = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    elsewhere.add(getattr(torch.optim, "Muon", torch.optim.Optimizer))
    assert classes - elsewhere == {cls for cls, _ in OPTIMIZERS.values()}


def test_every_optimizer_equals_the_cpu():
    """As loops and by lists, in turn; of those that compiled steps take every sixth."""
    models, step = together(
        (name, ("single", "foreach")[number % 2])
        for number, name in enumerate(OPTIMIZERS)
        if name in REFUSED or number % 6 == 0
    )
    x, y = X.to("jax"), Y.to("jax")
    for _ in range(STEPS):
        step(x, y)
        xs.sync()
    for (name, form), model in models.items():
        close(model, on_the_cpu(name), where=f"{name} {form}")


# --- Compiled ------------------------------------------------------------------------------------

# Their next step is decided in Python: from the step's number, or with min() of the learning rate.
REFUSED = {
    "RAdam": "compared in a Python condition",
    "ASGD": "converted to a Python float",
    "NAdam": "on a CPU tensor with a number that changes",
}


def is_refused(name: str, form: str) -> bool:
    return name in REFUSED and ("capturable" not in form or name == "ASGD")


def compiled_cases() -> Iterator[Case]:
    """One form of each optimizer, in turn."""
    for number, name in enumerate(OPTIMIZERS):
        forms = [form for form in forms_of(name)[1:] if not is_refused(name, form)]
        if forms:
            yield name, forms[number % len(forms)]


def test_compiled_steps_equal_the_cpu():
    models, step = together(compiled_cases())
    assert {form for _, form in models} == {*FORMS} - {"default"}
    compiled, x, y = xs.compile(step), X.to("jax"), Y.to("jax")
    for _ in range(STEPS):
        compiled(x, y)
    for (name, form), model in models.items():
        close(model, on_the_cpu(name), where=f"{name} {form}")
    assert len(compiled.replays) <= 2


@pytest.mark.parametrize("name", ["ASGD", "NAdam"])
def test_a_step_that_python_decides_is_refused_and_undone(name):
    cls, options = OPTIMIZERS[name]
    model, step = stepper(lambda p: cls(p, **options), "jax")
    x, y = X.to("jax"), Y.to("jax")
    with pytest.raises(xs.CaptureError, match=REFUSED[name]):
        xs.compile(step)(x, y)
    close(model, Model("cpu"))
    for _ in range(STEPS if name == "ASGD" else 0):
        step(x, y)
    if name == "ASGD":
        close(model, on_the_cpu(name))


def test_asgd_compiles_with_its_learning_rate_in_a_tensor():
    _, options = OPTIMIZERS["ASGD"]
    form = {**options, "lr": torch.tensor(options["lr"], device="jax"), "foreach": True}
    model, step = stepper(lambda p: torch.optim.ASGD(p, capturable=True, **form), "jax")
    compiled, x, y = xs.compile(step), X.to("jax"), Y.to("jax")
    for _ in range(STEPS):
        compiled(x, y)
    close(model, on_the_cpu("ASGD"))


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_a_learning_rate_of_each_group_may_change_between_compiled_steps(form):
    models = {}
    for device, options in (("cpu", {}), ("jax", FORMS[form])):
        model = models[device] = Model(device)
        groups = [{"params": [model.weight], "weight_decay": 0.5}]
        optimizer = torch.optim.AdamW(groups, 0.1, **options)
        optimizer.add_param_group({"params": [model.bias], "lr": 0.2})

        def step(x, y, model=model, optimizer=optimizer):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        run = xs.compile(step) if device == "jax" else step
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            run(X.to(device), Y.to(device))
    close(models["jax"], models["cpu"])
    assert len(run.replays) == 1


# --- Those that are different --------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_lbfgs():
    """In float64: its line search makes much of the last bit."""
    models = []
    for device in ("cpu", "jax"):
        model = Model("cpu").double().to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn="strong_wolfe")

        def closure(model=model, optimizer=optimizer, device=device):
            optimizer.zero_grad()
            loss = model(X.double().to(device), Y.double().to(device))
            loss.backward()
            return loss

        optimizer.step(closure)
        models.append(model)
    close(models[1], models[0])


def test_lbfgs_reads_values_and_is_refused_in_a_compiled_step():
    model = Model("jax")
    optimizer = torch.optim.LBFGS(model.parameters())

    @xs.compile
    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    with pytest.raises(xs.CaptureError, match=r"test_optimizers.py:\d+: a compiled step needs"):
        step(X.to("jax"), Y.to("jax"))
    close(model, Model("cpu"))


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 3, sparse=True).to("jax")
    with pytest.raises(NotImplementedError, match="sparse"):
        table(torch.tensor([1, 2], device="jax")).sum().backward()
    dense = torch.nn.Embedding(5, 3).to("jax")
    dense(torch.tensor([1, 2], device="jax")).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        torch.optim.SparseAdam(list(dense.parameters())).step()


# --- Groups, state, meshes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("Adam amsgrad", "cpu", "jax"),
        ("SGD momentum", "jax", "jax"),
        ("Rprop", "jax", "cpu"),
    ],
)
def test_state_moves_between_devices(name, first, second):
    cls, options = OPTIMIZERS[name]
    made = []
    for device in (first, second):
        model = Model(device)
        optimizer = cls(model.parameters(), **options)
        if made:
            model.load_state_dict(copy.deepcopy(made[0][0].state_dict()))
            optimizer.load_state_dict(copy.deepcopy(made[0][1].state_dict()))
        for _ in range(1 + len(made)):
            optimizer.zero_grad()
            model(X.to(device), Y.to(device)).backward()
            optimizer.step()
        made.append((model, optimizer))
    close(made[1][0].to("cpu"), on_the_cpu(name))


def test_state_follows_the_layout_of_its_parameter(mesh):
    made = []
    for form in ("single", "fused"):
        model = Model("jax")
        iso.shard(model, mesh, iso.Plan({"weight": P("y", None), "bias": P()}))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1, **FORMS[form])
        made.append((model, optimizer))
    for _ in range(STEPS):
        for model, optimizer in made:
            model(X.to("jax"), Y.to("jax")).backward()
            optimizer.step()
            optimizer.zero_grad()
        xs.sync()
    for model, optimizer in made:
        close(model, on_the_cpu("AdamW"))
        moment = optimizer.state[model.weight]["exp_avg"]
        assert moment.partition_spec == model.weight.partition_spec == P("y")


class Counting(torch.optim.Optimizer):
    """As transformers' Adafactor: Python's own count of steps, and `math` of it."""

    def __init__(self, params, read=False):
        super().__init__(params, {"lr": 0.1, "decay": -0.8, "read": read})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["square"] = 0, torch.zeros_like(p)
                state["step"] += 1
                beta = 1.0 - math.pow(state["step"], group["decay"])
                state["square"].mul_(beta).addcmul_(p.grad, p.grad, value=1.0 - beta)
                rate = group["lr"] / math.sqrt(state["step"] + 1)
                if group["read"]:
                    rate *= 1 + state["step"] % 2 if state["step"] < 100 else 0
                p.addcdiv_(p.grad, state["square"].sqrt().add_(1e-3), value=-rate)


@pytest.mark.parametrize("kind", ["math", "branch", "transformers"])
def test_a_count_of_steps_in_python(kind, counted):
    from transformers.optimization import Adafactor

    def optimizer(params):
        if kind == "transformers":
            return Adafactor(params, lr=0.1, scale_parameter=False, relative_step=False)
        return Counting(params, read=kind == "branch")

    model, step = stepper(optimizer, "jax")
    expected, cpu_step = stepper(optimizer, "cpu")
    compiled, x, y = xs.compile(step), X.to("jax"), Y.to("jax")
    calls = 5
    for n in range(calls):
        cpu_step(X, Y)
        compiled(x, y)
        if n == 1:
            captures, compilations = counted("captures"), counted("compilations")
    close(model, expected)
    if kind == "branch":  # on the count itself, which a replay would freeze
        assert counted("calls_without_replay") == calls
    else:
        assert counted("calls_without_replay") == 1  # the first, which initializes the state
        assert (counted("captures"), counted("compilations")) == (captures, compilations)


@pytest.mark.parametrize("form", ["single", "foreach"])
def test_adafactor_reads_nothing(form, counted):
    options = {**OPTIMIZERS["Adafactor"][1], **FORMS[form]}
    model, step = stepper(lambda p: torch.optim.Adafactor(p, **options), "jax")
    x, y = X.to("jax"), Y.to("jax")
    before = counted("executions")
    for _ in range(STEPS):
        step(x, y)
        xs.sync()
    assert counted("executions") - before == STEPS
    close(model, on_the_cpu("Adafactor"))
