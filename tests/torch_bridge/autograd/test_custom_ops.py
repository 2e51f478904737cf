"""A user's own operators: `torch.library` and `xs.register_lowering` on the `jax` device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import on_both, raises_on_both, same
from tests.torch_bridge.training.test_training import draw

custom_op = torch.library.custom_op
NAME = "isoshard_custom_tests"


# --- Operators made of others --------------------------------------------------------------------


@custom_op(f"{NAME}::swiglu", mutates_args=())
def swiglu(x: torch.Tensor, y: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    """Made of aten operators, with a derivative: works as it is."""
    return x * torch.sigmoid(beta * x) * y


@swiglu.register_fake
def _(x: torch.Tensor, y: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.beta = inputs[2]


def _swiglu_backward(ctx: Any, g: torch.Tensor) -> Any:
    x, y = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return g * y * s * (1 + ctx.beta * x * (1 - s)), g * x * s, None


swiglu.register_autograd(_swiglu_backward, setup_context=_keep)


@custom_op(f"{NAME}::accumulate_", mutates_args=("total",))
def accumulate_(total: torch.Tensor, x: torch.Tensor) -> None:
    """Changes an argument."""
    total.add_(x.sum(0))


@custom_op(f"{NAME}::parts", mutates_args=())
def parts(xs: list[torch.Tensor], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Lists in, several results out."""
    return torch.stack(xs).sum(0), [x * count for x in xs]


@parts.register_fake
def _(xs: list[torch.Tensor], count: int) -> Any:
    return torch.empty_like(xs[0]), [torch.empty_like(x) for x in xs]


def test_an_operator_made_of_others_works_as_it_is():
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = swiglu(x, y, 1.5)
        z.sum().backward()
        total = torch.zeros(4, device=x.device)
        version = total._version
        accumulate_(total, x.detach())
        first, rest = parts([x.detach(), y.detach()], 3)
        return z, x.grad, y.grad, total, total._version > version, first, rest

    on_both(program, draw(3, 4), draw(3, 4, seed=1))


def test_it_is_recorded_and_compiled_with_the_rest(counted, mesh):
    x = iso.shard(draw(8, 4), mesh, P("x", "y"))
    y = swiglu(x, x) + 1
    assert counted("executions") == counted("fallbacks") == 0
    same(y, swiglu(draw(8, 4), draw(8, 4)) + 1)
    assert counted("executions") == 1
    step = xs.compile(lambda a: swiglu(a, a).sum())
    for seed in range(3):
        data = draw(8, 4, seed=seed)
        same(step(data.to("jax")), swiglu(data, data).sum())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's loop over the batch
def test_it_works_under_vmap():
    data = draw(3, 4)
    got = torch.func.vmap(lambda row: swiglu(row, row))(data.to("jax"))
    same(got, swiglu(data, data))


# --- Kernels and lowerings for this device -------------------------------------------------------


@custom_op(f"{NAME}::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """Goes through NumPy."""
    return torch.from_numpy(np.cbrt(x.numpy()))


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_in_numpy_works_and_is_counted(counted):
    x = draw(3, 4).to("jax") * 2
    same(opaque(x), opaque(draw(3, 4) * 2))
    assert counted("fallbacks") == 1 and counted(f"fallbacks.{NAME}::opaque") == 1
    assert counted("transfers.device_to_host") >= 1


def test_a_kernel_in_numpy_is_refused_in_a_compiled_step():
    step = xs.compile(lambda a: opaque(a) + 1)
    with pytest.raises(RuntimeError, match=r"(?s)the value of a tensor|compiled step"):
        step(torch.ones(3, device="jax"))


@custom_op(f"{NAME}::elsewhere", mutates_args=(), device_types="cpu")
def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Has a kernel for the CPU only."""
    return x * 2


@elsewhere.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_for_another_device_is_an_error_that_names_the_ways_out():
    with pytest.raises(
        NotImplementedError, match=rf"{NAME}.elsewhere.*register_lowering\('{NAME}::elsewhere'"
    ):
        elsewhere(torch.ones(3, device="jax"))


@custom_op(f"{NAME}::two_kernels", mutates_args=(), device_types="cpu")
def two_kernels(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@two_kernels.register_kernel("jax")
def _(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, xs.XLAShardedTensor)
    return (x + x).clone()


@two_kernels.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_kernel_for_this_device():
    on_both(lambda x: two_kernels(x), grad=False)


@custom_op(f"{NAME}::lowered", mutates_args=())
def lowered(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.cbrt(x.numpy())) * scale, x.max()


@lowered.register_fake
def _(x: torch.Tensor, scale: float) -> Any:
    return torch.empty_like(x), x.new_empty(())


def _lowered_backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
    (root,) = ctx.saved_tensors
    return g * ctx.scale / (3 * root * root), None


def _keep_root(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0] / inputs[1])
    ctx.scale = inputs[1]


lowered.register_autograd(_lowered_backward, setup_context=_keep_root)


def test_a_lowering_replaces_the_kernel_even_after_its_first_use(counted):
    def program(x: torch.Tensor) -> Any:
        y, top = lowered(x, 2.0)
        y.sum().backward()
        return y, top.detach(), x.grad

    data = draw(3, 4).abs() + 0.5
    on_both(program, data)
    before = counted("fallbacks")
    assert before > 0
    xs.register_lowering(f"{NAME}::lowered", lambda x, scale: (jnp.cbrt(x) * scale, jnp.max(x)))
    on_both(program, data)
    assert counted("fallbacks") == before


def test_a_lowering_that_returns_the_wrong_number_of_results_is_named():
    with torch.library._scoped_library(f"{NAME}_scoped", "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        library.impl("one", lambda x: torch.empty_like(x), "Meta")
        xs.register_lowering(f"{NAME}_scoped::one", lambda x: (x, x))
        with pytest.raises(TypeError, match=r"one.* returned 2 values, torch promises 1"):
            torch.ops.isoshard_custom_tests_scoped.one(torch.ones(2, device="jax")).cpu()


def test_operators_of_a_library_of_ones_own():
    """The older interface: composite kernels, with and without derivatives of their own."""
    with torch.library._scoped_library(f"{NAME}_old", "DEF") as library:
        library.define("implicit(Tensor x) -> Tensor")
        library.impl("implicit", lambda x: x.sin() * 2, "CompositeImplicitAutograd")
        library.define("explicit(Tensor x) -> Tensor")
        library.impl("explicit", lambda x: x.sin() * 2, "CompositeExplicitAutograd")
        ops = torch.ops.isoshard_custom_tests_old

        def program(x: torch.Tensor) -> Any:
            y = ops.implicit(x)
            y.sum().backward()
            return y, x.grad, ops.explicit(x.detach())

        on_both(program)


def test_an_error_in_a_kernel_or_a_lowering_reaches_the_user():
    @custom_op(f"{NAME}::failing", mutates_args=())
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in a kernel")

    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        failing(torch.ones(2, device="jax"))
    failing.register_fake(lambda x: torch.empty_like(x))

    def bad(x: jax.Array) -> jax.Array:
        raise LookupError("in a lowering")

    xs.register_lowering(f"{NAME}::failing", bad)
    with pytest.raises(LookupError, match="in a lowering"):
        failing(torch.ones(2, device="jax")).cpu()
    raises_on_both(lambda x: x.view(5), match=r"shape")
