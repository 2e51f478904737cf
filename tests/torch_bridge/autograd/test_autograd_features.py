"""What a user does with autograd beyond `loss.backward()`: hooks, graphs, functions, grad modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import functional as derivatives
from torch.autograd import graph
from torch.autograd.gradcheck import GradcheckError

from tests.torch_bridge.on_both import on_both, raises_on_both
from tests.torch_bridge.training.test_training import draw

# torch's own, when it loads its rules for forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
functional = torch.nn.functional
VECTOR = draw(4)


# --- Hooks ---------------------------------------------------------------------------------------


def test_hooks_of_graph_nodes_and_of_several_gradients():
    def program(x: torch.Tensor) -> Any:
        seen: list[Any] = []
        y, other = x.sin(), x.cos()
        z = y * other
        z.grad_fn.register_prehook(lambda outs: (outs[0] * 2,))
        graph.register_multi_grad_hook((y, other), lambda grads: seen.extend(grads))
        z.sum().backward()
        return x.grad, seen, z.grad_fn.next_functions[0][0].name()

    on_both(program)


def test_an_optimizer_in_the_backward_pass():
    """The memory-saving recipe: step and drop each gradient as it is made."""

    def program(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        model.to(x.device)
        optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(x.detach()).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        return list(model.parameters())

    on_both(program)


# --- A user's own functions ----------------------------------------------------------------------


class Everything(torch.autograd.Function):
    """Two inputs, two outputs (one without a derivative), a number, and an unused input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int, y: torch.Tensor, unused: Any) -> Any:
        total, where = (x**power) * y, x > 0
        ctx.save_for_backward(x, y, total, None)
        ctx.mark_non_differentiable(where)
        ctx.set_materialize_grads(False)
        ctx.power = power
        return total, where

    @staticmethod
    def backward(ctx: Any, g: Any, no: Any) -> Any:
        assert no is None
        x, _, total, none = ctx.saved_tensors
        assert none is None
        to_x = g * ctx.power * total / x if ctx.needs_input_grad[0] else None
        to_y = g * x**ctx.power if ctx.needs_input_grad[2] else None
        return to_x, None, to_y, None


def test_a_function_with_everything():
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        total, where = Everything.apply(x, 3, y, None)
        total.sum().backward()
        fixed, _ = Everything.apply(x.detach(), 2, y, None)
        fixed.sum().backward()
        return total, where, x.grad, y.grad

    on_both(program, draw(3, 4), draw(3, 4, seed=1))


class Doubled(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


def test_a_function_that_changes_its_input():
    def program(x: torch.Tensor) -> Any:
        y = x * 1
        z = Doubled.apply(y)
        assert z is y and y.grad_fn.name() == "DoubledBackward"
        version = y._version
        (y * y).sum().backward()
        return y, x.grad, version

    on_both(program)
    raises_on_both(lambda x: Doubled.apply(x), match=r"a leaf Variable that requires grad")


class Cube(torch.autograd.Function):
    """In the newer style, with every transformation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return t * 3 * x * x


def test_a_function_in_the_newer_style_under_transformations():
    def program(x: torch.Tensor) -> Any:
        y = Cube.apply(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        v = x.detach()
        return (
            y,
            g,
            h,
            torch.func.vmap(Cube.apply)(v),
            torch.func.grad(lambda a: Cube.apply(a).sum())(v),
            torch.func.vmap(torch.func.grad(lambda a: Cube.apply(a).sum()))(v),
            torch.func.jvp(Cube.apply, (v,), (torch.ones_like(v),)),
        )

    on_both(program)


class Once(torch.autograd.Function):
    """Must not be differentiated twice; with a vmap rule of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.expand(ctx.shape)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return x.movedim(in_dims[0], 0).flatten(1).sum(1) + info.batch_size, 0


def test_a_function_with_a_vmap_rule_that_can_be_differentiated_once():
    def twice(x: torch.Tensor) -> None:
        (g,) = torch.autograd.grad(Once.apply(x).square(), x, create_graph=True)
        g.sum().backward()

    on_both(lambda x: torch.func.vmap(Once.apply, in_dims=1)(x), grad=False)
    on_both(lambda x: torch.autograd.grad(Once.apply(x), x))
    raises_on_both(twice, match=r"marked with @once_differentiable")


# --- Higher derivatives --------------------------------------------------------------------------


def cubic(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum() + (x[0] * x[1]).exp()


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin() * x.sum(), x[:2] * 2


FUNCTIONAL = {
    "jacobian": lambda x: derivatives.jacobian(pair, x),
    "jacobian forward": lambda x: derivatives.jacobian(
        pair, x, vectorize=True, strategy="forward-mode"
    ),
    "hessian forward": lambda x: derivatives.hessian(
        cubic, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jvp": lambda x: derivatives.jvp(pair, x, torch.ones_like(x)),
    "hvp": lambda x: derivatives.hvp(cubic, x, torch.ones_like(x)),
    "batched gradients": lambda x: torch.autograd.grad(
        pair(x)[0], x, torch.eye(4, device=x.device), is_grads_batched=True
    ),
    "third": lambda x: torch.autograd.grad(
        torch.autograd.grad(
            torch.autograd.grad((x**5).sum(), x, create_graph=True)[0].sum(), x, create_graph=True
        )[0].sum(),
        x,
    ),
}


def test_derivatives_of_functions():
    on_both(lambda x: {name: function(x) for name, function in FUNCTIONAL.items()}, VECTOR)


def test_gradcheck(x64):
    x = draw(2, 2).double().to("jax").requires_grad_()
    w = draw(2, 2, seed=1).double().to("jax").requires_grad_()

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.softplus(a @ b).cumsum(0) * a[:, :2].sin()

    assert torch.autograd.gradcheck(program, (x, w), check_forward_ad=True, fast_mode=True)
    with pytest.raises(GradcheckError, match=r"Jacobian mismatch"):
        torch.autograd.gradcheck(lambda a: Wrong.apply(a), (x,), fast_mode=True)


class Wrong(torch.autograd.Function):
    """Has a false derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3
