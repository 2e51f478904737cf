"""What a replay would not repeat is refused, and everything is as before."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import metrics
from tests.torch_bridge.engine.capture.test_compile import batches, make_step, net


def _item(model, optimizer, x):
    return x * model(x).sum().item()


def _branch(model, optimizer, x):
    return x if model(x).sum() > 0 else -x


def _print(model, optimizer, x):
    print(model(x))
    return x


def _log(model, optimizer, x):
    logger = logging.Logger("refused")
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.error("%s", model(x))  # `logging` catches what formatting raises, and goes on
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
    "item": (_item, r"test_compile_refused.py:\d+.*value of a tensor.*[Rr]eturn the tensor"),
    "branch": (_branch, r"test_compile_refused.py:\d+.*value of a tensor.*torch\.where"),
    "print": (_print, r"value of a tensor"),
    "log": (_log, r"test_compile_refused.py:\d+.*value of a tensor"),
    "mask": (_mask, r"value of a tensor"),
    "outside upload": (_outside_upload, r"CPU tensor of shape \(8, 6\).*pass it as an argument"),
    "outside copy": (_outside_copy, r"CPU tensor of shape \(8, 6\).*pass it as an argument"),
    "host random": (_host_random, r"(?i)random|CPU tensor"),
    "host permutation": (_host_permutation, r"(?i)random|CPU tensor"),
    "scheduler": (_scheduler, r"scheduler.*after the compiled step"),
    "rate in python": (_rate_in_python, r"compared in a Python condition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_a_replay_could_not_repeat_is_refused(name, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # or it prints a traceback
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
    assert "test_compile_refused.py" in metrics.compilations()[0].where
