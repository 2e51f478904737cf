"""Layouts of the values inside a Flax model, by module name, without touching the model's code.

    plan = Plan(activations={"blocks.*.up": P("data", None, "model")})
    with constrain_activations(mesh, plan, model):      # NNX: the modules of `model`
        y = model(x)
    with constrain_activations(mesh, plan):             # Linen: every module called meanwhile
        y = linen_model.apply(variables, x)

Inside `jit` the values are constrained, outside they are moved. NNX modules are named by their
paths (`blocks.0.up`), Linen modules by theirs (`blocks_0.up`); the whole model is called "".

An NNX module of which the plan speaks is, for the time of the `with`, of a subclass of its own
class whose `__call__` lays out what goes in and what comes out. No class is changed, and other
modules of the same class are not concerned. Linen's modules are met by `nn.intercept_methods`.
A function that is compiled already is not traced anew, so enter the `with` inside of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from isoshard.core.layout.axis_types import constrain, on_value_mesh
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.unused_rules import check_activation_axes, warn_unused_activations
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.formatting import listed

from .call_classes import called_by, of_classes
from .graphs import is_nnx
from .layout import LEFT_OUT, mesh_first


@dataclasses.dataclass
class Constrained:
    """What a plan had to say while it constrained.

    Attributes:
        modules: for each module it spoke of, the patterns that decided.
        others: modules that were met and of which it says nothing.

    Example:
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        >>> with constrain_activations(mesh, {"layers.*": ("data", None)}, model) as seen:
        ...     _ = model(jax.numpy.ones((4, 8)))
        >>> seen
        Constrained(modules={'layers.0': 'layers.*'}, others={'': None})
    """

    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    others: dict[str, None] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def constrain_activations(
    mesh: Any = LEFT_OUT, plan: Any = LEFT_OUT, *models: Any
) -> Iterator[Constrained]:
    """Lay out what goes into and comes out of the modules that a plan speaks of.

    Args:
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`constrain_activations(plan, model)`) where `jax.set_mesh` has set one. In a JAX
            transformation a value on Auto axes of this grid stays on them.
        plan: a `Plan` with activations, or a mapping of module patterns and specs.
        *models: NNX modules whose parts are concerned. Linen modules need not be named.

    Yields:
        Which modules the plan speaks of.

    Raises:
        PlanError: no pattern matches a module, or a spec does not fit its values.
        TypeError: a model is no NNX module.

    Example:
        >>> from flax import nnx
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((2, 4), ("data", "model"))
        >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        >>> with constrain_activations(mesh, {"layers.0": ("data", "model")}, model) as seen:
        ...     print(model(jax.numpy.ones((4, 8))).sharding.spec, seen.modules)
        P('data', 'model') {'layers.0': 'layers.0'}
    """
    call = "constrain_activations(mesh, plan, model)"
    mesh, plan, *named = mesh_first(call, mesh, plan, *models)
    plan = plan if isinstance(plan, Plan) else Plan(activations=plan)
    check_activation_axes(plan, mesh)
    seen = Constrained()
    if not plan_speaks(plan):
        yield seen
        return
    with contextlib.ExitStack() as stack:
        for model in named:
            stack.enter_context(_subclassed(model, mesh, plan, seen))
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            stack.enter_context(linen.intercept_methods(_interceptor(mesh, plan, seen)))
        _refuse_if_in_vain(seen, enough=bool(named) and linen is None)
        yield seen
    _refuse_if_in_vain(seen)


def plan_speaks(plan: Any) -> bool:
    """Tell whether a plan says anything of activations."""
    return isinstance(plan, Plan) and any(factor.activations for factor in (plan, *plan.factors))


@contextlib.contextmanager
def _subclassed(model: Any, mesh: Mesh, plan: Plan, seen: Constrained) -> Iterator[None]:
    """For the time of the `with`, each NNX module that the plan speaks of lays its values out."""
    if not is_nnx(model):
        raise TypeError(
            f"activations are constrained in NNX modules, not in a {type(model).__name__}; of "
            "Linen no module is named, and Equinox modules are not served"
        )
    nnx = sys.modules["flax.nnx"]
    asked = [
        (module, type(module), _asked(plan, ".".join(map(str, path)), seen))
        for path, module in nnx.iter_modules(model)
        if callable(module)
    ]
    if any(said is not None for _, _, said in asked):
        names = [".".join(map(str, path)) for path, _ in nnx.iter_modules(model)]
        warn_unused_activations(plan, names)
    changed = [
        (module, _subclass(kind, said, mesh)) for module, kind, said in asked if said is not None
    ]
    with of_classes(changed):
        yield


@cached(4096)
def _subclass(kind: type, said: Any, mesh: Mesh) -> type:
    """A class that calls as `kind` does, and lays out the values.

    One for each, so that an NNX graph of it is equal to the next one and compiles once.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _around(said, mesh, functools.partial(kind.__call__, self), args, kwargs)

    return called_by(kind, call)


def _interceptor(mesh: Mesh, plan: Plan, seen: Constrained) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        said = _asked(plan, ".".join(context.module.path), seen)
        return call(*args, **kwargs) if said is None else _around(said, mesh, call, args, kwargs)

    return intercept


def _asked(plan: Plan, name: str, seen: Constrained) -> Any:
    said = plan.activation_for(name)
    if said is None:
        seen.others[name] = None
    else:
        seen.modules[name] = said.rule
    return said


def _around(said: Any, mesh: Mesh, call: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a module with its arguments laid out, and lay out its result."""
    if said.says("input"):
        positions = {str(number): value for number, value in enumerate(args)}
        laid = _laid_out(said, "input", {**positions, **kwargs}, mesh)
        args = [laid[position] for position in positions]
        kwargs = {name: laid[name] for name in kwargs}
    result = call(*args, **kwargs)
    return _laid_out(said, "output", result, mesh) if said.says("output") else result


def _laid_out(said: Any, side: str, value: Any, mesh: Mesh) -> Any:
    found = [(path_name(path), x) for path, x in _leaves(value)]
    shapes = {name: tuple(x.shape) for name, x in found if hasattr(x, "shape")}
    layouts = said.resolve(side, shapes, mesh)
    laid = iter(_constrained(x, layouts[name]) if name in layouts else x for name, x in found)
    return jax.tree.map(lambda _: next(laid), value, is_leaf=_is_leaf)


def _constrained(x: Any, layout: NamedSharding) -> Any:
    """The value laid out; a traced one on Auto axes stays on them, as what it meets next does."""
    return constrain(x, on_value_mesh(x, layout)) if isinstance(x, Tracer) else _moved(x, layout)


_moved = jax.jit(constrain, static_argnums=1)


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(value, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    """Only plain containers are looked into: a module among the arguments must stay itself."""
    return node is not None and not isinstance(node, tuple | list | dict)


def _refuse_if_in_vain(seen: Constrained, *, enough: bool = True) -> None:
    if enough and not seen.modules and seen.others:
        names = listed([*map(repr, seen.others)], 20)
        raise PlanError(
            "no pattern for activations matches a module that is called; the modules are "
            f"{names} ('' is the whole model)"
        )
