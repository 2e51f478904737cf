"""What cannot be captured is refused with the line of the user's code that asked for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.capture.test_compile import batches, net


def _here() -> int:
    """The line after the caller's."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno + 1


LINE: dict[str, int] = {}


def _branch(x: torch.Tensor) -> torch.Tensor:
    LINE["branch"] = _here()
    if x.sum() > 0:
        return x
    return -x


def _item(x: torch.Tensor) -> torch.Tensor:
    LINE["item"] = _here()
    return x * x.mean().item()


def _float(x: torch.Tensor) -> torch.Tensor:
    LINE["float"] = _here()
    return x * float(x.mean())


def _print(x: torch.Tensor) -> torch.Tensor:
    LINE["print"] = _here()
    print(x)
    return x * 1


def _format(x: torch.Tensor) -> torch.Tensor:
    LINE["format"] = _here()
    assert f"{x.mean():.3f}"
    return x * 1


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    LINE["nonzero"] = _here()
    return x.nonzero()


def _masked(x: torch.Tensor) -> torch.Tensor:
    LINE["masked"] = _here()
    return x[x > 0]


def _unique(x: torch.Tensor) -> torch.Tensor:
    LINE["unique"] = _here()
    return torch.unique(x)


def _equal(x: torch.Tensor) -> torch.Tensor:
    LINE["equal"] = _here()
    return x * torch.equal(x, -x)


def _numpy(x: torch.Tensor) -> torch.Tensor:
    LINE["numpy"] = _here()
    return x * x.numpy().mean().item()


def _loop(x: torch.Tensor) -> torch.Tensor:
    LINE["loop"] = _here()
    while x.norm() > 1:
        x = x / 2
    return x


def _length(x: torch.Tensor) -> torch.Tensor:
    LINE["length"] = _here()
    return x[: x.argmax()]


def _sync(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    LINE["sync"] = _here()
    xs.sync()
    return x


def _array(x: torch.Tensor) -> torch.Tensor:
    LINE["array"] = _here()
    iso.to_jax(x.detach() * 2)
    return x


BODIES = {
    f.__name__[1:]: f
    for f in (
        *(_branch, _item, _float, _print, _format, _nonzero, _masked),
        *(_unique, _equal, _numpy, _loop, _length, _sync, _array),
    )
}


def _refused(step: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(xs.CaptureError) as caught:
        step(*args)
    return str(caught.value)


@pytest.mark.parametrize("name", BODIES)
def test_the_line_in_the_step(name):
    x = batches(1)[0][0].to("jax")
    message = _refused(xs.compile(BODIES[name]), x)
    assert message.startswith(f"test_compile_lines.py:{LINE[name]}: "), message
    assert "value of a tensor" in message and "torch.where" in message


@pytest.mark.parametrize("name", BODIES)
def test_the_line_in_a_modules_forward(name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return BODIES[name](self.first(x))

    model = torch.nn.Sequential(Model()).to("jax")
    before = {key: value.cpu() for key, value in model.state_dict().items()}
    message = _refused(xs.compile(lambda x: model(x).sum()), batches(1)[0][0].to("jax"))
    assert message.startswith(f"test_compile_lines.py:{LINE[name]}: "), message
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[key])


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, hook: model.first.register_forward_hook(lambda m, a, out: hook(out)),
    "forward before": lambda model, hook: model.first.register_forward_pre_hook(
        lambda m, args: (hook(args[0]),)
    ),
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
    HOOKS[kind](model, _branch)
    x = batches(1)[0][0].to("jax").requires_grad_()

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    message = _refused(xs.compile(train), x)
    assert message.startswith(f"test_compile_lines.py:{LINE['branch']}: "), message
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    train(x)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_line_of_a_branch_on_a_learning_rate():
    model = net().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        LINE["rate"] = _here()
        return x if optimizer.param_groups[0]["lr"] > 0.01 else -x

    message = _refused(xs.compile(step), batches(1)[0][0].to("jax"))
    assert message.startswith(f"test_compile_lines.py:{LINE['rate']}: "), message


def test_the_line_of_random_numbers_and_uploads_of_the_cpu():
    def draws(x: torch.Tensor) -> torch.Tensor:
        LINE["draws"] = _here()
        return x + torch.rand(6).to("jax")

    outside = torch.ones(6)

    def uploads(x: torch.Tensor) -> torch.Tensor:
        LINE["uploads"] = _here()
        return x + outside.to("jax")

    for step, name in ((draws, "draws"), (uploads, "uploads")):
        message = _refused(xs.compile(step), batches(1)[0][0].to("jax"))
        assert message.startswith(f"test_compile_lines.py:{LINE[name]}: "), message


def test_what_has_no_line_inside_names_the_step():
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + 1

    line = step.__code__.co_firstlineno
    compiled = xs.compile(step)
    x = batches(1)[0][0].to("jax")
    compiled(x)
    assert _refused(compiled, x).startswith(f"test_compile_lines.py:{line}: 1 tensors computed")


def test_an_error_of_the_user_passes_through_and_leaves_everything_as_it_was():
    model = net(dropout=0.5, norm=True).to("jax")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fail = [True]

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if fail[0]:
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
    fail[0] = False
    losses = [step(x, y).item() for _ in range(6)]
    assert losses[-1] < losses[0]
