"""Grad modes, saved tensors, anomaly mode, and what autograd refuses: as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import graph

from tests.torch_bridge.on_both import on_both, raises_on_both

functional = torch.nn.functional


# --- Grad modes ----------------------------------------------------------------------------------


def test_grad_modes_nest_and_decorate():
    @torch.no_grad()
    def frozen(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.inference_mode()
    def inferred(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def program(x: torch.Tensor) -> Any:
        found = [frozen(x).requires_grad, inferred(x).requires_grad, (x * 2).requires_grad]
        with torch.set_grad_enabled(False):
            found.append((x * 2).requires_grad)
            with torch.enable_grad():
                found.append((x * 2).requires_grad)
            torch.set_grad_enabled(True)
            found.append((x * 2).requires_grad)
        found.append(torch.is_grad_enabled())
        with torch.no_grad():
            found += [torch.empty_like(x).requires_grad, x.view(-1).requires_grad]
            parameter = torch.nn.Parameter(x)
        return found, parameter.requires_grad, parameter.is_leaf

    on_both(program)


def test_inference_tensors():
    def program(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x.detach() * 2
            y.add_(1)
            y[0].zero_()
            z = y.view(-1)
            flags = [y.is_inference(), z.is_inference(), x.is_inference()]
            with torch.inference_mode(False):
                w = x * 3
                flags.append(w.requires_grad)
        copied = y.clone()
        return y, z, flags, (copied * x).sum(), copied.is_inference()

    on_both(program)


def _inference_saved(x: torch.Tensor) -> None:
    with torch.inference_mode():
        y = x.detach() * 2
    (x * y).sum().backward()


def _inference_changed(x: torch.Tensor) -> None:
    with torch.inference_mode():
        y = x.detach() * 2
    y.add_(1)


def _inference_version(x: torch.Tensor) -> None:
    with torch.inference_mode():
        y = x.detach() * 2
    print(y._version)


def test_inference_tensors_are_refused_outside():
    raises_on_both(_inference_saved, match=r"Inference tensors cannot be saved for backward")
    raises_on_both(_inference_changed, match=r"Inplace update to inference tensor")
    raises_on_both(_inference_version, match=r"Inference tensors do not track version counter")


# --- Versions, leaves and views ------------------------------------------------------------------


def test_version_counters():
    def program(x: torch.Tensor) -> Any:
        found = [x._version]
        view = x.view(-1)
        x.add_(1)
        found += [x._version, view._version]
        view[0:2].mul_(2)
        found += [x._version, view._version]
        x.detach().zero_()
        found.append(x._version)
        x.data.zero_()
        found.append(x._version)
        x[0] = 3.0
        x.copy_(torch.ones_like(x))
        torch.add(x, x, out=x)
        x.requires_grad_()
        with torch.no_grad():
            x.sub_(1)
        found.append(x._version)
        with torch.autograd._unsafe_preserve_version_counter(x), torch.no_grad():
            x.sub_(1)
        found.append(x._version)
        return found, x

    on_both(program, grad=False)


def _saved_then_changed(x: torch.Tensor) -> None:
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def _saved_then_changed_through_a_view(x: torch.Tensor) -> None:
    y = x.exp()
    y[0].zero_()
    y.sum().backward()


def _base_changed_after_a_view_was_saved(x: torch.Tensor) -> None:
    y = x * 1
    z = y[0].sin()
    y.mul_(2)
    z.sum().backward()


def _weight_changed_by_an_optimizer(x: torch.Tensor) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4, device=x.device))
    loss = (x @ weight).sin().sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD([weight], 0.1).step()
    loss.backward()


def _changed_in_a_function(x: torch.Tensor) -> None:
    y = x * 1
    z = torch.sigmoid(y)
    functional.relu(z, inplace=True)
    z.sum().backward()


CHANGED = [
    _saved_then_changed,
    _saved_then_changed_through_a_view,
    _base_changed_after_a_view_was_saved,
    _weight_changed_by_an_optimizer,
    _changed_in_a_function,
]


def test_a_saved_tensor_that_was_changed_is_refused():
    message = r"needed for gradient computation has been modified by an inplace operation"
    for program in CHANGED:
        raises_on_both(program, match=message)


LEAVES = {
    "view of a leaf": (
        lambda x: x.view(-1).add_(1),
        r"a view of a leaf Variable that requires grad is being used in an in-place operation",
    ),
    "element of a leaf": (
        lambda x: x.__setitem__(0, 1.0),
        r"a (view of a )?leaf Variable that requires grad is being used in an in-place operation",
    ),
    "one of several views": (
        lambda x: (x * 1).unbind(0)[0].add_(1),
        r"is the output of a function that returns multiple views",
    ),
    "out of a differentiable": (
        lambda x: torch.exp(x, out=torch.empty_like(x)),
        r"don't support automatic differentiation, but one of the arguments requires grad",
    ),
    "numpy": (lambda x: x.numpy(), r"Can't call numpy\(\) on Tensor that requires grad"),
    "grad of a wrong shape": (
        lambda x: setattr(x, "grad", torch.ones(7, device=x.device)),
        r"assign.*size",
    ),
    "grad of a wrong dtype": (
        lambda x: setattr(x, "grad", torch.ones_like(x, dtype=torch.float16)),
        r"assign.*type",
    ),
    "deepcopy of a result": (
        lambda x: __import__("copy").deepcopy(x * 2),
        r"Only Tensors created explicitly by the user",
    ),
    "expanded": (
        lambda x: x.detach()[0].expand(3, 4).add_(1),
        r"more than one element .*refers to a single memory location",
    ),
    "integers": (lambda x: (x > 0).requires_grad_(), r"[Oo]nly Tensors of floating point"),
}


def test_what_autograd_refuses():
    for program, message in LEAVES.values():
        raises_on_both(program, match=message)


def test_a_gradient_on_another_device_is_refused():
    x = torch.ones(3, device="jax", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"gradient on cpu; move it with \.to\('jax'\)"):
        (x * 2).backward(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"device type 'cpu'"):
        x.grad = torch.ones(3)
    assert x.grad is None
    x.sum().backward(torch.tensor(3.0))
    assert x.grad.tolist() == [3, 3, 3]


# --- Saved tensors -------------------------------------------------------------------------------


def test_saved_tensors_on_the_cpu():
    def program(x: torch.Tensor) -> Any:
        with graph.save_on_cpu():
            y = (x.exp() * x.sin()).tanh() @ x.t()
        y.sum().backward()
        return y, x.grad

    on_both(program)


def test_hooks_of_saved_tensors():
    def program(x: torch.Tensor) -> Any:
        packed: list[Any] = []

        def pack(t: torch.Tensor) -> int:
            packed.append(t.detach() * 1)
            return len(packed) - 1

        with graph.saved_tensors_hooks(pack, lambda number: packed[number] * 2):
            y = x * x.sin()
        saved = y.grad_fn._saved_self
        y.sum().backward()
        return x.grad, packed, saved

    on_both(program)


def test_saved_tensors_that_change_are_copied_before():
    def program(x: torch.Tensor) -> Any:
        with graph.allow_mutation_on_saved_tensors() as copies:
            a = x * 1
            view = a[1:]
            y = a.exp()
            loss = (a * y).sum() + (view**2).sum() + view.sin().sum()
            a.mul_(3)
            y.zero_()
            copied = len(copies.cloned)
            view.add_(1)
            loss.backward()
        return a, y, x.grad, copied

    on_both(program)


# --- Anomalies -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_anomaly_mode_names_the_operation():
    def program(x: torch.Tensor) -> None:
        with torch.autograd.detect_anomaly():
            (x.detach().requires_grad_() * 0).sub(1).sqrt().sum().backward()

    raises_on_both(program, match=r"Function 'SqrtBackward0' returned nan values in its 0th output")

    def healthy(x: torch.Tensor) -> Any:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            x.exp().sum().backward()
        return x.grad

    on_both(healthy)
    x = torch.ones(3, device="jax", requires_grad=True)
    with pytest.warns(UserWarning) as shown, torch.autograd.set_detect_anomaly(True):
        y = (x - 2).sqrt()
        with pytest.raises(RuntimeError, match=r"SqrtBackward0"):
            y.sum().backward()
    assert any("y = (x - 2).sqrt()" in str(warning.message) for warning in shown)
