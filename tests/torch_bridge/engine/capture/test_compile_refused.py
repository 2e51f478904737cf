"""What a replay would not repeat is refused with the line that asked, and all is as before."""

from __future__ import annotations

import io
import logging
import queue
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from tests.torch_bridge.engine.capture.test_compile import batches, make_step, net

OUTSIDE = torch.ones(8, 6)
LOGGER = logging.Logger("refused")  # `logging` catches what formatting raises, and goes on
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))


def _loop(x):
    while x.norm() > 1:
        x = x / 2
    return x


def _sync(x):
    x = x * 2
    xs.sync()
    return x


VALUE = r"(?=.*value of a tensor)(?=.*[Rr]eturn the tensor)(?=.*torch\.where)"
UPLOAD = r"CPU tensor of shape \(8, 6\).*pass it as an argument"
RANDOM = r"(?i)random|CPU tensor"
BODIES: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (lambda x: x if x.sum() > 0 else -x, VALUE),
    "loop": (_loop, VALUE),
    "item": (lambda x: x * x.mean().item(), VALUE),
    "float": (lambda x: x * float(x.mean()), VALUE),
    "print": (lambda x: print(x) or x, VALUE),
    "format": (lambda x: x * len(f"{x.mean():.3f}"), VALUE),
    "log": (lambda x: LOGGER.error("%s", x) or x, VALUE),
    "nonzero": (lambda x: x.nonzero(), VALUE),
    "mask": (lambda x: x[x > 0], VALUE),
    "unique": (lambda x: torch.unique(x), VALUE),
    "equal": (lambda x: x * torch.equal(x, -x), VALUE),
    "numpy": (lambda x: x * x.numpy().mean().item(), VALUE),
    "length": (lambda x: x[: x.argmax()], VALUE),
    "sync": (_sync, VALUE),
    "array": (lambda x: iso.to_jax(x.detach() * 2), VALUE),
    "upload": (lambda x: x + OUTSIDE.to("jax"), UPLOAD),
    "copy": (lambda x: torch.zeros(8, 6, device="jax").copy_(OUTSIDE), UPLOAD),
    "random": (lambda x: x + torch.randn(6).to("jax"), RANDOM),
    "permutation": (lambda x: x[torch.randperm(8).to("jax")], RANDOM),
}
LATER = {"loop": 1, "sync": 2}
"""In which line of a function it is asked for, if not in its first."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # or it prints a traceback


def refused(step: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(xs.CaptureError) as caught:
        step(*args)
    return str(caught.value)


def assert_matches(message: str, start: str, text: str = "") -> None:
    assert message.startswith(start), message
    assert re.search(text, message), message


def starts_at(name: str) -> str:
    line = BODIES[name][0].__code__.co_firstlineno + LATER.get(name, 0)
    return rf"test_compile_refused.py:{line}: "


@pytest.mark.parametrize("name", BODIES)
def test_the_line_in_the_step(name):
    body, text = BODIES[name]
    x = batches(1)[0][0].to("jax")
    assert_matches(refused(xs.compile(body), x), starts_at(name), text)
    assert xs.compile(lambda x: x * 2)(x).shape == x.shape


def test_the_line_in_a_modules_forward():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self.first(x))

    model = torch.nn.Sequential(Model()).to("jax")
    before = {key: value.cpu() for key, value in model.state_dict().items()}
    x = batches(1)[0][0].to("jax")
    for name in ("branch", "loop", "item", "print", "nonzero", "mask", "sync"):
        body = BODIES[name][0]
        assert_matches(refused(xs.compile(lambda x: model(x).sum()), x), starts_at(name))
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[key])


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, hook: model.first.register_forward_hook(lambda m, a, out: hook(out)),
    "full backward": lambda model, hook: model.first.register_full_backward_hook(
        lambda m, before, after: (hook(before[0]),)
    ),
    "tensor": lambda model, hook: model.last.weight.register_hook(hook),
    "accumulated": lambda model, hook: model.last.weight.register_post_accumulate_grad_hook(
        lambda p: print(hook(p.grad))
    ),
    "optimizer": lambda model, hook: model.optimizer.register_step_pre_hook(
        lambda o, args, kwargs: print(hook(model.last.weight.grad))
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_the_line_in_a_hook(kind):
    model = net().to("jax")
    optimizer = model.__dict__["optimizer"] = torch.optim.Adam(model.parameters())
    HOOKS[kind](model, BODIES["branch"][0])
    x = batches(1)[0][0].to("jax").requires_grad_()

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    assert_matches(refused(xs.compile(train), x), starts_at("branch"))
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    if kind == "tensor":
        train(x)
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_schedulers_and_learning_rates_in_conditions():
    model = net().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def schedules(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
        return x + 0

    compares = lambda x: x if optimizer.param_groups[0]["lr"] > 0.01 else -x  # noqa: E731
    x = batches(1)[0][0].to("jax")
    line = compares.__code__.co_firstlineno
    message = refused(xs.compile(compares), x)
    assert_matches(message, f"test_compile_refused.py:{line}: ", "compared in a Python condition")
    step = xs.compile(schedules)
    with pytest.raises(xs.CaptureError, match=r"scheduler.*after the compiled step"):
        step(x), step(x), step(x)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.isfinite(model(x).cpu()).all()


KEPT: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # nobody sees what is in it


def fail(loss: torch.Tensor) -> None:
    raise ZeroDivisionError("by the user")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda loss: loss.item(), r"value of a tensor"),
        (lambda loss: KEPT.put(loss * 2), r"outlive it without being returned"),
        (fail, r"by the user"),
    ],
    ids=["a value", "a tensor that escapes", "an error of the user"],
)
def test_a_model_is_usable_after_a_step_failed(use, message):
    """Training goes on, step by step and compiled, though its updates were recorded."""
    model = net().to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = make_step(model, optimizer)
    data = [[t.to("jax") for t in pair] for pair in batches(2)]
    plain(*data[0])
    before = {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}

    @xs.compile
    def step(x, y):
        loss = plain(x, y)
        use(loss)
        return loss

    with pytest.raises((xs.CaptureError, ZeroDivisionError), match=message):
        for _ in range(2):
            step(*data[1])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for name, tensor in model.named_parameters():
        assert torch.isfinite(tensor.detach().cpu()).all()
        assert tensor.grad is None or torch.isfinite(tensor.grad.cpu()).all()
        if "outlive" not in message:  # the first call is one step
            assert torch.equal(tensor.detach().cpu(), before[name])
    losses = [plain(*data[1]).item(), *(xs.compile(plain)(*data[1]).item() for _ in range(2))]
    assert np.isfinite(losses).all()


def test_an_error_of_the_user_leaves_everything_as_it_was():
    model = net(dropout=0.5, norm=True).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fails = [True]

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if fails[0]:
            optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            raise LookupError("by the user")
        optimizer.zero_grad()
        return loss.detach()

    x, y = (t.to("jax") for t in batches(1)[0])
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    random = torch.jax.get_rng_state()
    step = xs.compile(train)
    with pytest.raises(LookupError, match=r"by the user"):
        step(x, y)
    assert not optimizer.state and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.jax.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), state[key]), key
    fails[0] = False
    losses = [step(x, y).item() for _ in range(6)]
    assert losses[-1] < losses[0]


def test_arguments_that_are_refused():
    @xs.compile
    def step(x: torch.Tensor, how: Any = None) -> torch.Tensor:
        return x * 2

    with pytest.raises(xs.CaptureError, match=r"CPU tensor of shape \(2,\) as an argument.*'jax'"):
        step(torch.ones(2))
    with pytest.raises(xs.CaptureError, match=r"type ndarray, which is neither"):
        step(torch.ones(2, device="jax"), np.ones(2))


def test_an_escaping_tensor_is_refused_and_names_the_step():
    kept: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.put((x * 3).sum())
        return x + 1

    compiled, x = xs.compile(step), torch.ones(2, device="jax")
    compiled(x)
    start = f"test_compile_refused.py:{step.__code__.co_firstlineno}: 1 tensors computed"
    assert_matches(refused(compiled, x), start, r"outlive it without being returned")
    assert kept.get().item() == 6


def test_a_list_that_grows_is_filled_without_replay(counted):
    history = []

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        history.append((x * 3).sum())
        return x + 1

    for number in range(3):
        step(torch.full((2,), float(number), device="jax"))
    assert [one.item() for one in history] == [0, 6, 12]
    assert counted("calls_without_replay") == 3


def test_a_constant_made_inside_is_no_upload_from_outside():
    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0], device="jax")
        mask = torch.ones(2, 2).tril().to("jax")
        return (x * weights) @ mask + torch.arange(2, device="jax")

    x = torch.ones(2, device="jax")
    assert [step(x).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3


def test_a_compiled_step_under_jax_is_refused():
    inner = xs.compile(lambda x: x * 2)
    f = iso.jax_function(lambda x: inner(x))
    with pytest.raises(xs.CaptureError, match=r"while JAX traces"):
        jax.jit(f)(jax.numpy.ones(2))
    x = torch.ones(2, device="jax")
    assert_matches(refused(xs.compile(lambda x: inner(x)), x), "", "inside another compiled step")


def test_metrics_name_the_compiled_step(counted):
    @xs.compile
    def my_step(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    assert my_step.__name__ == "my_step"
    for _ in range(3):
        my_step(torch.ones(3).to("jax"))
    assert counted("compilations") == 1
    assert "test_compile_refused.py" in metrics.compilations()[0].where
