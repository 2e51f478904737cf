"""Steps of Flax models as traced steps.

A step is a function of NNX objects, jitted or not, that may update them as under `nnx.jit`. The
models need no memory: `nnx.eval_shape(lambda: Model(rngs))`.

>>> import optax
>>> from flax import nnx
>>> from isoshard.core.plan import Plan
>>> from isoshard.planner.machine.topologies import topology
>>> model = nnx.eval_shape(lambda: nnx.Linear(512, 2048, rngs=nnx.Rngs(0)))
>>> optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
>>> def step(model, optimizer, x):
...     loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
...     optimizer.update(model, grads)
...     return loss
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
>>> x = jax.ShapeDtypeStruct((64, 512), "float32")
>>> plan = Plan({"kernel": (None, "model"), "bias": None}, inputs=("data",))
>>> for leaf in traced_flax_step(step, (model, optimizer, x), {}, mesh, plan).inputs:
...     print(leaf.name, leaf.role, leaf.shape, leaf.sharding.spec)
bias parameter (2048,) P()
kernel parameter (512, 2048) P(None, 'model')
opt_state.0.count number () P()
opt_state.0.mu.bias optimizer (2048,) P()
opt_state.0.mu.kernel optimizer (512, 2048) P(None, 'model')
opt_state.0.nu.bias optimizer (2048,) P()
opt_state.0.nu.kernel optimizer (512, 2048) P(None, 'model')
step number () P()
x input (64, 512) P('data',)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from isoshard.core.kit import Role, TracedStep, names_of, path_name, traced_jax_step
from isoshard.jax_bridge.kit import (
    called_by,
    constrain_activations,
    has_activations,
    is_nnx,
    is_random_state,
    is_variable,
    join,
    join_parts,
    named_boxes,
    of_classes,
    split,
)

from .output_marks import marked_gradients, with_marks, with_output_mark

if TYPE_CHECKING:
    from isoshard.jax_bridge.kit import TrainState


def traced_flax_step(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
) -> TracedStep:
    """Trace a step of NNX objects for a mesh and a plan, without data.

    Args:
        step: a function of NNX objects and pytrees.
        args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        mesh: over attached or described devices.
        plan: the `Plan`, or one spec for every parameter.

    Raises:
        PlanError: the plan does not fit.
    """
    function = getattr(step, "fun", step)  # what `nnx.jit` wraps
    bound = inspect.signature(function).bind(*args, **kwargs)
    objects = {
        name: split(argument) for name, argument in bound.arguments.items() if is_nnx(argument)
    }
    others = {name: argument for name, argument in bound.arguments.items() if name not in objects}
    roles: dict[str, Role] = {
        name: role
        for _, state in objects.values()
        for path, box in jax.tree.leaves_with_path(state, is_leaf=is_variable)
        for name, role in _roles(path, box)
    }
    graphs = {name: graph for name, (graph, _) in objects.items()}
    names = {
        name: text
        for _, state in objects.values()
        for name, box in named_boxes(state).items()
        if (text := names_of(box)) is not None
    }

    def on_states(**arguments: Any) -> Any:
        new = {name: join(graph, arguments.pop(name)) for name, graph in graphs.items()}
        models = [value for value in new.values() if callable(value)]
        call = inspect.signature(function).bind(*args, **kwargs)
        call.arguments.update(new | arguments)
        with contextlib.ExitStack() as stack:
            if has_activations(plan) and models:
                stack.enter_context(constrain_activations(mesh, plan, *models))
            stack.enter_context(marked_modules(models, gradients=plan is None))
            result = function(*call.args, **call.kwargs)
        return {**{name: split(value)[1] for name, value in new.items()}, "result": result}

    modules = [
        argument
        for _, argument in bound.arguments.items()
        if is_nnx(argument) and callable(argument)
    ]
    states = {name: state for name, (_, state) in objects.items()}
    title = getattr(function, "__name__", type(function).__name__)
    result = traced_jax_step(
        on_states, (), states | others, mesh, plan, batch=tuple(others), axis_names=names,
        roles=roles, name=title, framework="flax",
    )  # fmt: skip
    return dataclasses.replace(result, modules=tuple(name for name, _ in _modules_of(modules)))


@contextlib.contextmanager
def marked_modules(models: Sequence[Any], *, gradients: bool) -> Iterator[None]:
    """Context in which traces mark the outputs of modules with the modules' names."""
    modules = [
        (module, _marking(type(module), name, gradients)) for name, module in _modules_of(models)
    ]
    with of_classes(modules), marked_gradients():
        yield


def _modules_of(models: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (".".join(map(str, path)), module)
        for model in models
        for path, module in sys.modules["flax.nnx"].iter_modules(model)
        if callable(module)
    ]


@functools.lru_cache(maxsize=4096)
def _marking(kind: type, name: str, gradients: bool) -> type:
    """A subclass of `kind` whose calls mark their outputs."""
    mark = with_marks if gradients else with_output_mark

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        return jax.tree.map(lambda x: mark(x, name), result)

    return called_by(kind, call)


def traced_train_step(
    function: Callable[..., tuple[Any, ...]],
    state: TrainState,
    batch: Sequence[Any],
    mesh: Mesh,
    plan: Any,
) -> TracedStep:
    """Trace the step of a `TrainStep` for a mesh and a plan, without data.

    Args:
        function: of a state and a tuple of the batch; returns the next state, the loss and more.
        state: arrays may be shapes.
        batch: likewise.
        mesh: over attached or described devices.
        plan: the `Plan`, or one spec for every parameter.

    Raises:
        PlanError: the plan does not fit.
    """

    def training_step(step: Any, params: Any, rest: Any, opt_state: Any, *batch: Any) -> Any:
        full = dataclasses.replace(state, step=step, params=params, rest=rest, opt_state=opt_state)
        new, loss, aux = function(full, batch)
        return new.step, new.params, new.rest, new.opt_state, loss, aux

    names = {
        name: text
        for name, box in named_boxes(state.params).items()
        if (text := names_of(box)) is not None
    }
    roles: dict[str, Role] = {
        path_name(path): "buffer" for path, _ in jax.tree.leaves_with_path(state.rest)
    }
    arrays = (state.step, state.params, state.rest, state.opt_state)
    result = traced_jax_step(
        training_step, (*arrays, *batch), {}, mesh, plan, axis_names=names, roles=roles,
        framework="flax",
    )  # fmt: skip
    nnx = [join_parts(state.parts, state.params, state.rest)] if state.parts.is_nnx else []
    return dataclasses.replace(result, modules=tuple(name for name, _ in _modules_of(nnx)))


def _roles(path: tuple[Any, ...], box: Any) -> list[tuple[str, Role]]:
    """The roles of a variable's arrays, where its class decides them."""
    if isinstance(box, sys.modules["flax.nnx"].Param | sys.modules["flax.nnx"].OptState):
        return []
    role: Role = "random" if is_random_state(box) else "buffer"
    return [(path_name(path + rest), role) for rest, _ in jax.tree.leaves_with_path(box)]
