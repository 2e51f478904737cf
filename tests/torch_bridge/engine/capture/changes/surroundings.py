"""Changes of what is around a step: seeds, dtypes, modes, precision, contexts, meshes, marks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh
from isoshard.domain.torch_handlers import register_function_handler
from tests.torch_bridge.engine.capture.changes import objects, worlds
from tests.torch_bridge.engine.capture.changes.worlds import linear, state_of, table


def generator(device: str) -> Any:
    """A generator with a seed."""
    made = torch.Generator() if device == "cpu" else xs.Generator("jax")
    return made.manual_seed(3)


def product(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """A product, and a gradient where there are any."""
    y = torch.matmul(x, weight)
    if not y.requires_grad:
        return y
    (gradient,) = torch.autograd.grad(y.float().square().sum(), weight)
    return y.detach(), gradient


def entering(device: str) -> tuple[torch.Tensor, contextlib.ExitStack]:
    """A weight, and what contexts are entered in."""
    return linear(3).weight.detach().to(device).requires_grad_(), contextlib.ExitStack()


def spec(tensor: Any) -> str:
    """How a tensor lies, once it is computed."""
    xs.sync()
    return str(tensor.sharding_spec)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def handler(shards: Any, a: Any, b: Any) -> Any:
    """Three times a product of vectors."""
    return shards.all_reduce(torch.dot(a, b) * 3, shards.axes(a, 0)), ()


KNOWN = {
    **objects.KNOWN,
    **globals(),
    "jax": jax,
    "iso": iso,
    "P": P,
    "Plan": Plan,
    "make_mesh": make_mesh,
    "ExitStack": contextlib.ExitStack,
    "register_function_handler": register_function_handler,
    "state_of": state_of,
}
row = functools.partial(worlds.row, known=KNOWN)

# --- Random numbers ------------------------------------------------------------------------------

table(
    r"""
torch.manual_seed | seed | torch.manual_seed(3) | x + torch.rand_like(x) | torch.manual_seed(5) |
    torch.manual_seed(3) | ! against='pattern'
the seed and the state of a generator, and another one | generator, Generator, own, state |
    own = generator(device)\nstart = own.get_state() |
    x + torch.rand(4, 4, device=x.device, generator=own) | own.manual_seed(5) | own.manual_seed(3) |
    own.set_state(start) | own = generator(device) | ! against='pattern'
Dropout's probability with random numbers | p | drop = torch.nn.Dropout(0.5)\ntorch.manual_seed(7) |
    drop(torch.linspace(1, 2, 16, device=x.device).reshape(4, 4)) + x * 0 | drop.p = 0.9\n
    torch.manual_seed(7) | drop.p = 0.5\ntorch.manual_seed(7) | ! against='pattern'
""",
    row,
)

# --- torch's settings ----------------------------------------------------------------------------

FLOAT32 = "on a CPU products of float32 are computed in float32, whatever else is allowed"
SAME = "it chooses between ways to the same numbers"
KNOWN |= {"FLOAT32": FLOAT32, "SAME": SAME}
table(
    r"""
the default dtype | dtype | | x * torch.finfo(torch.get_default_dtype()).bits |
    torch.set_default_dtype(torch.bfloat16) | torch.set_default_dtype(torch.float32)
the default dtype of a factory | dtype | |
    x.float() * torch.full((4, 4), 0.1, device=device).float() |
    torch.set_default_dtype(torch.bfloat16) | torch.set_default_dtype(torch.float32)
""",
    row,
)

row = functools.partial(row, without=worlds.WHOLE)
for question, put, first, second in (
    ("get_float32_matmul_precision() == 'highest'", "torch.set_float32_matmul_precision",
     "'highest'", "'medium'"),
    ("are_deterministic_algorithms_enabled()", "torch.use_deterministic_algorithms",
     "False", "True"),
    ("is_grad_enabled()", "torch.set_grad_enabled", "True", "False"),
    ("get_default_dtype() is torch.float32", "torch.set_default_dtype", "torch.float32",
     "torch.bfloat16"),
    ("is_autocast_enabled('cpu')", "functools.partial(torch.set_autocast_enabled, 'cpu')", "False",
     "True"),
    ("get_num_threads() == 1", "torch.set_num_threads", "1", "2"),
    ("is_anomaly_enabled()", "torch.autograd.set_detect_anomaly", "False", "True"),
):  # fmt: skip
    name = question.partition("(")[0]
    row(
        f"a setting that the step asks for: {name}",
        ", ".join([name, *name.split("_")]),
        f"{put}({first})",
        f"x * 2 if torch.{question} else -x",
        f"{put}({second})",
        f"{put}({first})",
    )

row = functools.partial(row, close="stack.close()")
table(
    r"""
gradients off: no_grad | grad | weight, stack = entering(device) | product(x, weight) |
    stack.enter_context(torch.no_grad()) | stack.close()
gradients off: inference_mode | inference | weight, stack = entering(device) | product(x, weight) |
    stack.enter_context(torch.inference_mode()) | stack.close()
autocast on, off, and with another dtype | autocast | weight, stack = entering(device) |
    product(x, weight) | stack.enter_context(torch.autocast(device, dtype=torch.bfloat16)) |
    stack.close() | stack.enter_context(torch.autocast(device, dtype=torch.float16)) | ! rtol=2e-2
autocast off that was on | autocast | weight, stack = entering(device)\n
    stack.enter_context(torch.autocast(device, dtype=torch.bfloat16)) | product(x, weight) |
    stack.close() | stack.enter_context(torch.autocast(device, dtype=torch.bfloat16)) | ! rtol=2e-2
set_float32_matmul_precision | precision | weight, stack = entering(device) | product(x, weight) |
    torch.set_float32_matmul_precision('medium') | torch.set_float32_matmul_precision('highest') |
    ! unseen=FLOAT32
jax_default_matmul_precision | precision | weight, stack = entering(device) | product(x, weight) |
    jax.config.update('jax_default_matmul_precision', 'BF16_BF16_F32') |
    jax.config.update('jax_default_matmul_precision', None) | ! unseen=FLOAT32, against='lazy'
use_deterministic_algorithms | deterministic | weight, stack = entering(device) |
    product(x, weight) | torch.use_deterministic_algorithms(True) |
    torch.use_deterministic_algorithms(False) | ! unseen=SAME
anomaly detection | anomaly | weight, stack = entering(device) | product(x, weight) |
    stack.enter_context(torch.autograd.set_detect_anomaly(True)) | stack.close() | ! unseen=SAME
a dispatch mode | mode, Doubling | stack = ExitStack() | torch.tanh(x) + 1 |
    stack.enter_context(Doubling()) | stack.close()
the default device | device, meta | stack = ExitStack() |
    x * (2 if torch.ones(1).is_meta else 1) | stack.enter_context(torch.device('meta')) |
    stack.close()
""",
    row,
)

# --- Layouts, meshes, handlers -------------------------------------------------------------------

row = functools.partial(row, against="lazy", close="pass")
table(
    r"""
a mark on a parameter, none, and another mesh | sharding, layout, mesh |
    model = linear(1).to(device)\nmesh = make_mesh((2, 4), ('x', 'y'))\n
    xs.mark_sharding(model.weight, mesh, P('x')) | model(x) * 2 | xs.clear_sharding(model.weight)\n
    xs.mark_sharding(model.weight, mesh, P(None, 'y')) | xs.clear_sharding(model.weight) |
    xs.mark_sharding(model.weight, mesh, P('x')) |
    iso.shard(model, make_mesh((4, 2), ('x', 'y')), Plan({'*': P('x', None)})) |
    ! state="{'spec': spec(model.weight), **state_of(model)}"
a mark in the step | spec, sharding | model = linear(1).to(device)\n
    mesh = make_mesh((2, 4), ('x', 'y'))\nspecs = [P('x', None)] |
    xs.mark_sharding(model(x), mesh, specs[0]) | specs[0] = P(None, 'y') | specs[0] = P('x', None)
the global mesh that the step asks for | mesh |
    meshes = [xs.Mesh(np.arange(8), shape, ('x', 'y')) for shape in ((2, 4), (4, 2))]\n
    xs.set_global_mesh(meshes[0]) | x * xs.get_global_mesh().mesh_shape[0] |
    xs.set_global_mesh(meshes[1]) | xs.set_global_mesh(meshes[0]) |
    ! close='xs.set_global_mesh(None)'
constrain_activations | hook, activation | mesh = make_mesh((2, 4), ('x', 'y'))\n
    model = torch.nn.Sequential(linear(1), torch.nn.ReLU()).to(device)\n
    plan, stack = Plan(activations={'0': P('x', 'y')}), ExitStack() | y = model[0](x)\n
    return model[1](y), y | stack.enter_context(xs.constrain_activations(model, mesh, plan)) |
    stack.close() | ! close='stack.close()', without=(*worlds.WHOLE, 'dynamo')
a function handler | handler, sum |
    split = iso.shard(torch.arange(8.0), make_mesh((4,), ('x',)), P('x'))\nstack = ExitStack() |
    x * torch.dot(split, split) |
    stack.enter_context(register_function_handler(torch.dot, handler)) | stack.close() |
    ! close='stack.close()'
""",
    row,
)
