"""`torch.func` and forward-mode derivatives on the `jax` device, plain and inside `xs.compile`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.older_torch import INDEXING
from tests.torch_bridge.on_both import on_both, same
from tests.torch_bridge.training.test_training import draw

functional = torch.nn.functional
# torch's own: when it loads its rules for forward-mode derivatives, and in `linearize`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def smooth(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.flip(0).exp()).sum() + (x**3).prod()


def pair(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x.tanh() * x.sum(), {"b": x[:2] ** 2}


def mlp(x: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(
        x.device
    )


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 7.0
    y.mul_(x).add_(1)
    y.view(-1)[1:2].zero_()
    return y


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": lambda x: grad(smooth)(x[0]),
    "grad of grad": lambda x: grad(lambda a: grad(smooth)(a).sum())(x[0]),
    "grad aux": lambda x: grad(lambda a: (smooth(a), {"seen": a * 2}), has_aux=True)(x[0]),
    "grad with in-place": lambda x: grad(lambda a: in_place(a).sum())(x[0]),
    "vjp": lambda x: vjp(pair, x[0])[1]((x[0], {"b": x[0, :2]})),
    "jvp": lambda x: jvp(pair, (x[0],), (torch.ones_like(x[0]),)),
    "jvp of jvp": lambda x: jvp(
        lambda a: jvp(torch.sin, (a,), (torch.ones_like(a),))[1], (x,), (x,)
    ),
    "jacrev": lambda x: jacrev(pair)(x[0]),
    "jacfwd": lambda x: jacfwd(pair)(x[0]),
    "hessian": lambda x: hessian(smooth)(x[0]),
    "vmap": lambda x: vmap(torch.dot)(x, x.flip(1)),
    "vmap in_dims": lambda x: vmap(lambda a, b, c: a * b + c, in_dims=(1, None, 0))(
        x, x[:, 0], x.t()
    ),
    "vmap out_dims": lambda x: vmap(lambda a: (a, a * 2), out_dims=(1, -1))(x),
    "vmap nested": lambda x: vmap(vmap(lambda a, b: a * b, (None, 0)), (0, None))(x.view(-1), x),
    "vmap with in-place": lambda x: vmap(in_place)(x),
    "vmap chunked": lambda x: vmap(lambda a: a.softmax(0), chunk_size=2)(x),
    "vmap of matmul": lambda x: vmap(lambda a: a @ x.t() @ a.new_ones(3))(x),
    "vmap of a convolution": lambda x: vmap(
        lambda a: functional.conv1d(a[None, None], x[:1, None, :2])
    )(x),
    "vmap of grad": lambda x: vmap(grad(smooth))(x),
    "grad of vmap": lambda x: grad(lambda a: vmap(smooth)(a).sum())(x),
    "vmap of jvp": lambda x: vmap(lambda a: jvp(torch.tanh, (a,), (a,)))(x),
    "functionalize": lambda x: functionalize(in_place)(x[0]),
}


@pytest.mark.parametrize("kind", ["grad", "vjp", "jvp", "jac", "hessian", "functionalize", "vmap"])
def test_transforms_equal_the_cpu(kind):
    chosen = {name: f for name, f in TRANSFORMS.items() if name.startswith(kind)}
    on_both(lambda x: {name: f(x) for name, f in chosen.items()}, grad=False)


@INDEXING
def test_vmap_of_indexing():
    on_both(lambda x: vmap(lambda a, i: a[i])(x, torch.arange(3).to(x.device)), grad=False)


def test_linearize():
    on_both(lambda x: linearize(pair, x[0])[1](torch.ones_like(x[0])), grad=False)


def test_transforms_inside_a_compiled_step():
    def step(x: torch.Tensor) -> Any:
        names = "grad", "jvp", "hessian", "vmap of grad", "vmap with in-place"
        return {name: TRANSFORMS[name](x) for name in names}

    run = xs.compile(step)
    for seed in (0, 1, 2):
        x = draw(3, 4, seed=seed)
        same(run(x.to("jax")), step(x))


# --- Modules as functions ------------------------------------------------------------------------


def test_an_ensemble_as_one_vmap():
    def program(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        models = [
            torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(
                x.device
            )
            for _ in range(3)
        ]
        parameters, buffers = stack_module_state(models)
        skeleton = copy.deepcopy(models[0])

        def call(p: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
            return functional_call(skeleton, (p, b), (x,))

        one = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
        each = torch.stack([model(x) for model in models])
        one.sum().backward()
        return one, one - each, {name: p.grad for name, p in parameters.items()}

    on_both(program)


def per_sample(x: torch.Tensor) -> Any:
    model = mlp(x)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (row[None],)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(values, x)


def test_gradients_per_sample():
    on_both(per_sample, grad=False)


def test_gradients_per_sample_on_a_mesh(mesh):
    x = draw(8, 4)
    same(per_sample(iso.shard(x, mesh, P("x", None))), per_sample(x))


def test_a_training_step_with_func_inside_compile():
    def train(x: torch.Tensor, compiled: bool) -> Any:
        model = mlp(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            values = dict(model.named_parameters())
            gradients, value = grad_and_value(
                lambda v: functional_call(model, v, (x,)).square().mean()
            )(values)
            for name, p in values.items():
                p.grad = gradients[name]
            optimizer.step()
            optimizer.zero_grad()
            return value

        run = xs.compile(step) if compiled else step
        return [run(x) for _ in range(2)], list(model.parameters())

    want = train(draw(3, 4), False)
    same(train(draw(3, 4).to("jax"), True), want)


# --- Randomness ----------------------------------------------------------------------------------


def test_randomness_of_vmap():
    x = torch.ones(4, 64, device="jax")
    drop = lambda a: functional.dropout(a, 0.5)  # noqa: E731
    torch.manual_seed(0)
    different = vmap(drop, randomness="different")(x)
    alike = vmap(drop, randomness="same")(x)
    rows = different.cpu()
    assert not torch.equal(rows[0], rows[1]) and set(rows.unique().tolist()) == {0.0, 2.0}
    rows = alike.cpu()
    assert all(torch.equal(rows[0], row) for row in rows)
    normal = vmap(lambda a: torch.randn_like(a), randomness="different")(x).cpu()
    assert normal.unique().numel() > 200
    made = vmap(lambda a: a + torch.rand(64, device="jax"), randomness="same")(x).cpu()
    assert torch.equal(made[0], made[3])
    with pytest.raises(RuntimeError, match=r"randomness"):
        vmap(drop)(x)


# --- Forward mode --------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("jax", "cpu"), ("cpu", "jax")])
def test_a_dual_number_is_copied_to_another_device(source, target):
    with forward_ad.dual_level():
        primal = torch.arange(3.0).to(source)
        dual = forward_ad.make_dual(primal, 2 * primal)
        for copied in (torch.zeros(3).to(target).copy_(dual), dual.to(target)):
            value, tangent = forward_ad.unpack_dual(copied)
            assert value.device.type == target and value.tolist() == [0, 1, 2]
            assert tangent.tolist() == [0, 2, 4]


def test_dual_numbers():
    def program(x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y = (dual.sin() @ dual.t()).relu()
            view = dual[1:].reshape(-1)
            copied = dual.clone()
            copied[0] = 3.0
            copied.mul_(dual)
            results = [forward_ad.unpack_dual(t) for t in (y, view, copied, dual.softmax(1))]
            plain = forward_ad.unpack_dual(x * 2)
            assert plain.tangent is None
        return [(r.primal, r.tangent) for r in results]

    on_both(program, grad=False)


def test_forward_mode_through_a_module_and_over_reverse():
    def program(x: torch.Tensor) -> Any:
        model = mlp(x)
        with forward_ad.dual_level():
            for p in model.parameters():
                dual = forward_ad.make_dual(p.detach(), torch.ones_like(p))
                p.tangent = forward_ad.unpack_dual(dual).tangent
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            out = forward_ad.unpack_dual(model(dual))
            (g,) = torch.autograd.grad(dual.sin().sum(), x, create_graph=True)
        return out.primal.detach(), out.tangent.detach(), g.detach()

    on_both(program)
