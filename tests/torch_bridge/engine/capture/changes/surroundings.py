"""Changes of what is around a step: seeds, dtypes, modes, precision, contexts, meshes, marks."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh
from isoshard.torch_bridge.handlers import register_function_handler
from tests.torch_bridge.engine.capture.changes.training import _world as program
from tests.torch_bridge.engine.capture.changes.worlds import (
    BY_DYNAMO,
    World,
    both,
    linear,
    reads,
    state_of,
)

# --- Random numbers ------------------------------------------------------------------------------


@reads("torch.manual_seed", "seed", against="pattern")
def seeded(device: str) -> World:
    torch.manual_seed(3)
    return World(lambda x: x + torch.rand_like(x), *both(torch.manual_seed, 5, 3))


@reads("the seed of a generator", "generator", "Generator", against="pattern")
def own_generator(device: str) -> World:
    own = torch.Generator() if device == "cpu" else xs.Generator("jax")
    own.manual_seed(3)

    def read(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, 4, device=x.device, generator=own)

    return World(read, *both(own.manual_seed, 5, 3))


@reads("the state of the generator", "generator", "Generator", "state", against="pattern")
def generator_state(device: str) -> World:
    own = torch.Generator() if device == "cpu" else xs.Generator("jax")
    start = own.manual_seed(3).get_state()

    def read(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, 4, device=x.device, generator=own)

    return World(read, lambda: own.set_state(start), lambda: own.set_state(start))


@reads("another generator in the same variable", "own", "generator", against="pattern")
def another_generator(device: str) -> World:
    make = torch.Generator if device == "cpu" else lambda: xs.Generator("jax")
    own: Any = make().manual_seed(3)

    def read(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, 4, device=x.device, generator=own)

    def put() -> None:
        nonlocal own
        own = make().manual_seed(3)

    return World(read, put, put)


@reads("Dropout's probability with random numbers", "p", against="pattern")
def dropout(device: str) -> World:
    drop = torch.nn.Dropout(0.5)

    def put(p: float) -> None:
        drop.p = p
        torch.manual_seed(7)

    put(0.5)
    return World(
        lambda x: drop(torch.linspace(1, 2, 16, device=x.device).reshape(4, 4)) + x * 0,
        *both(put, 0.5, 0.9),
    )


# --- torch's settings ----------------------------------------------------------------------------


@reads("the default dtype", "dtype", rtol=1e-2)
def default_dtype(device: str) -> World:
    return World(
        lambda x: (
            x.detach().to(torch.get_default_dtype()) + torch.full((4, 4), 0.1, device=x.device)
        ),
        *both(torch.set_default_dtype, torch.float32, torch.bfloat16),
    )


@reads("the default dtype of a factory", "dtype")
def factory_dtype(device: str) -> World:
    return World(
        lambda x: x.float() * torch.full((4, 4), 0.1, device=x.device).float(),
        *both(torch.set_default_dtype, torch.float32, torch.bfloat16),
    )


def entered(make: Any) -> tuple[Any, Any]:
    """An edit that enters a context, and one that leaves it."""
    stack = contextlib.ExitStack()
    return (lambda: stack.enter_context(make())), stack.close


def _product(device: str) -> tuple[Any, torch.Tensor]:
    weight = linear(3).weight.detach().to(device).requires_grad_()

    def step(x: torch.Tensor) -> Any:
        y = torch.matmul(x, weight)
        if not y.requires_grad:
            return y
        (gradient,) = torch.autograd.grad(y.float().square().sum(), weight)
        return y.detach(), gradient

    return step, weight


@program("gradients off: no_grad", "grad")
def no_grad(device: str) -> World:
    return World(_product(device)[0], *entered(torch.no_grad))


@program("gradients off: inference_mode", "inference")
def inference_mode(device: str) -> World:
    return World(_product(device)[0], *entered(torch.inference_mode))


@program("autocast on", "autocast", rtol=2e-2)
def autocast(device: str) -> World:
    return World(
        _product(device)[0], *entered(lambda: torch.autocast(device, dtype=torch.bfloat16))
    )


@program("autocast off", "autocast", rtol=2e-2)
def autocast_off(device: str) -> World:
    step, _ = _product(device)
    stack = contextlib.ExitStack()

    def on() -> None:
        stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))

    on()
    return World(step, stack.close, on, close=stack.close)


@program("the dtype of autocast", "autocast", rtol=2e-2)
def autocast_dtype(device: str) -> World:
    weight = linear(3).weight.detach().to(device)
    stack = contextlib.ExitStack()

    def put(dtype: torch.dtype) -> None:
        stack.close()
        stack.enter_context(torch.autocast(device, dtype=dtype))

    put(torch.bfloat16)
    return World(
        lambda x: (torch.matmul(x, weight), torch.matmul(x, weight).float()),
        *both(put, torch.bfloat16, torch.float16),
        close=stack.close,
    )


ASKED: dict[str, tuple[Any, Any, tuple[Any, Any]]] = {
    "get_float32_matmul_precision": (
        lambda: torch.get_float32_matmul_precision() == "highest",
        torch.set_float32_matmul_precision,
        ("highest", "medium"),
    ),
    "are_deterministic_algorithms_enabled": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        (False, True),
    ),
    "is_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled, (True, False)),
    "get_default_dtype": (
        lambda: torch.get_default_dtype() is torch.float32,
        torch.set_default_dtype,
        (torch.float32, torch.bfloat16),
    ),
    "is_autocast_enabled": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
        (False, True),
    ),
    "get_num_threads": (lambda: torch.get_num_threads() == 1, torch.set_num_threads, (1, 2)),
    "is_anomaly_enabled": (
        torch.is_anomaly_enabled,
        lambda value: torch.autograd.set_detect_anomaly(value),
        (False, True),
    ),
}


def asked(device: str, name: str) -> World:
    question, put, (first, second) = ASKED[name]
    put(first)
    return World(lambda x: x * 2 if question() else -x, *both(put, first, second))


for name in ASKED:
    program(f"a setting that the step asks for: {name}", name, *name.split("_"))(
        lambda device, name=name: asked(device, name)
    )


FLOAT32 = "on a CPU products of float32 are computed in float32, whatever else is allowed"
SAME = "it chooses between ways to the same numbers"


@program("set_float32_matmul_precision", "precision", unseen=FLOAT32)
def matmul_precision(device: str) -> World:
    step, _ = _product(device)
    return World(step, *both(torch.set_float32_matmul_precision, "highest", "medium"))


@program("jax_default_matmul_precision", "precision", against="lazy", unseen=FLOAT32)
def jax_precision(device: str) -> World:
    def put(value: Any) -> None:
        jax.config.update("jax_default_matmul_precision", value)

    step, _ = _product(device)
    return World(step, *both(put, None, "BF16_BF16_F32"))


@program("use_deterministic_algorithms", "deterministic", unseen=SAME)
def deterministic(device: str) -> World:
    step, _ = _product(device)
    return World(step, *both(torch.use_deterministic_algorithms, False, True))


@program("anomaly detection", "anomaly", unseen=SAME)
def anomaly(device: str) -> World:
    step, _ = _product(device)
    return World(step, *entered(lambda: torch.autograd.set_detect_anomaly(True)))


# --- Layouts, meshes, handlers -------------------------------------------------------------------

LAYOUTS = {
    **dict.fromkeys(("scan",), "layouts are those of a step, not of what is inside a loop"),
    "accumulate": "layouts are those of a step, not of what is inside a loop",
}


def _mesh() -> Any:
    return make_mesh((2, 4), ("x", "y"))


def _spec(tensor: Any) -> str:
    xs.sync()
    return str(tensor.sharding_spec)


def _linear(device: str) -> tuple[Any, Any]:
    model = linear(1).to(device)
    return model, lambda x: model(x) * 2


@program("a mark on a parameter", "sharding", "layout", against="lazy", without=LAYOUTS)
def mark(device: str) -> World:
    model, step = _linear(device)
    mesh = _mesh()

    def put(spec: Any) -> None:
        xs.clear_sharding(model.weight)
        xs.mark_sharding(model.weight, mesh, spec)

    put(P("x", None))
    return World(
        step,
        *both(put, P("x", None), P(None, "y")),
        state=lambda: {"spec": _spec(model.weight), **state_of(model)},
    )


@program("a mark cleared", "sharding", "layout", against="lazy", without=LAYOUTS)
def mark_cleared(device: str) -> World:
    model, step = _linear(device)
    mesh = _mesh()
    xs.mark_sharding(model.weight, mesh, P("x", None))
    return World(
        step,
        lambda: xs.clear_sharding(model.weight),
        lambda: xs.mark_sharding(model.weight, mesh, P("x", None)),
        state=lambda: {"spec": _spec(model.weight), **state_of(model)},
    )


@program("a mark in the step", "spec", "sharding", against="lazy", without=LAYOUTS)
def mark_in_step(device: str) -> World:
    model, _ = _linear(device)
    mesh, specs = _mesh(), [P("x", None)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return xs.mark_sharding(model(x), mesh, specs[0])

    def put(spec: Any) -> None:
        specs[0] = spec

    return World(step, *both(put, P("x", None), P(None, "y")))


@program("the mesh of the parameters", "mesh", "layout", against="lazy", without=LAYOUTS)
def another_mesh(device: str) -> World:
    model, step = _linear(device)

    def put(mesh: Any) -> None:
        iso.shard(model, mesh, Plan({"*": P("x", None)}))

    first, second = _mesh(), make_mesh((4, 2), ("x", "y"))
    put(first)
    return World(
        step,
        *both(put, first, second),
        state=lambda: {"spec": _spec(model.weight), **state_of(model)},
    )


@program("the global mesh that the step asks for", "mesh", against="lazy", without=LAYOUTS)
def global_mesh(device: str) -> World:
    import numpy as np

    meshes = [xs.Mesh(np.arange(8), shape, ("x", "y")) for shape in ((2, 4), (4, 2))]

    def step(x: torch.Tensor) -> torch.Tensor:
        mesh: Any = xs.get_global_mesh()
        return x * mesh.mesh_shape[0]

    xs.set_global_mesh(meshes[0])
    return World(step, *both(xs.set_global_mesh, *meshes))


@program(
    "constrain_activations",
    "hook",
    "activation",
    against="lazy",
    without={**LAYOUTS, "dynamo": BY_DYNAMO},
)
def activations(device: str) -> World:
    model = torch.nn.Sequential(linear(1), torch.nn.ReLU()).to(device)
    mesh, plan = _mesh(), Plan(activations={"0": P("x", "y")})

    def step(x: torch.Tensor) -> Any:
        y = model[0](x)
        return model[1](y), y

    return World(step, *entered(lambda: xs.constrain_activations(model, mesh, plan)))


@program("a function handler", "handler", "sum", against="lazy", without=LAYOUTS)
def function_handler(device: str) -> World:
    mesh = make_mesh((4,), ("x",))
    split = iso.shard(torch.arange(8.0), mesh, P("x"))

    def handler(shards: Any, a: Any, b: Any) -> Any:
        return shards.all_reduce(torch.dot(a, b) * 3, shards.axes(a, 0)), ()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.dot(split, split)

    return World(step, *entered(lambda: register_function_handler(torch.dot, handler)))


@program("a dispatch mode", "mode", "Doubling")
def dispatch_mode(device: str) -> World:
    from torch.overrides import TorchFunctionMode

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    return World(lambda x: torch.tanh(x) + 1, *entered(Doubling))


@program("the default device", "device", "meta")
def default_device(device: str) -> World:
    return World(
        lambda x: x * (2 if torch.ones(1).is_meta else 1), *entered(lambda: torch.device("meta"))
    )
