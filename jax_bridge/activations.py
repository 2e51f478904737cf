"""Sharding constraints on activations of a Flax model by module name, without editing the model.

    plan = Plan(activations={"blocks.*.up": P("data", None, "model")})
    with constrain_activations(mesh, plan, model):      # NNX: the modules of `model`
        y = model(x)
    with constrain_activations(mesh, plan):             # Linen: every module called meanwhile
        y = linen_model.apply(variables, x)

Inside `jit` the values are constrained, outside they are moved. NNX modules are named by their
paths (`blocks.0.up`), Linen modules by theirs (`blocks_0.up`); the model itself is "".

Inside the `with`, an NNX module with a rule is an instance of a subclass of its class whose
`__call__` constrains its arguments and its result. No class is changed, and other modules of the
same class are not affected. Linen's modules are intercepted by `nn.intercept_methods`.
A function that is already compiled is not traced again, so enter the `with` inside of it.
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
    """The modules that `constrain_activations` saw.

    Attributes:
        modules: for each module with a rule, the patterns that matched.
        others: modules that were called and have no rule.

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
    """Constrain the arguments and results of the modules that have a rule in a plan.

    Args:
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`constrain_activations(plan, model)`) where `jax.set_mesh` has set one. In a JAX
            transformation a value on Auto axes of this grid remains on them.
        plan: a `Plan` with activations, or a mapping of module patterns and specs.
        *models: NNX modules whose submodules are constrained. Linen modules need not be named.

    Yields:
        The modules with a rule, and those without, filled in while the model runs.

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
    constrained = Constrained()
    if not has_activations(plan):
        yield constrained
        return
    with contextlib.ExitStack() as stack:
        for model in named:
            stack.enter_context(_subclassed(model, mesh, plan, constrained))
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            stack.enter_context(linen.intercept_methods(_interceptor(mesh, plan, constrained)))
        _check_matched(constrained, all_called=bool(named) and linen is None)
        yield constrained
    _check_matched(constrained)


def has_activations(plan: Any) -> bool:
    """Whether a plan has a rule for activations."""
    return isinstance(plan, Plan) and any(factor.activations for factor in (plan, *plan.factors))


@contextlib.contextmanager
def _subclassed(model: Any, mesh: Mesh, plan: Plan, constrained: Constrained) -> Iterator[None]:
    """Inside the `with`, each NNX module with a rule has a class that constrains its values."""
    if not is_nnx(model):
        raise TypeError(
            f"activations are constrained in NNX modules, not in a {type(model).__name__}; leave "
            "Linen modules out of the call; Equinox modules are not supported"
        )
    nnx = sys.modules["flax.nnx"]
    modules = [
        (module, type(module), _activations_of(plan, ".".join(map(str, path)), constrained))
        for path, module in nnx.iter_modules(model)
        if callable(module)
    ]
    if any(activations is not None for _, _, activations in modules):
        names = [".".join(map(str, path)) for path, _ in nnx.iter_modules(model)]
        warn_unused_activations(plan, names)
    changed = [
        (module, _subclass(kind, activations, mesh))
        for module, kind, activations in modules
        if activations is not None
    ]
    with of_classes(changed):
        yield


@cached(4096)
def _subclass(kind: type, activations: Any, mesh: Mesh) -> type:
    """A subclass of `kind` whose call constrains arguments and results.

    Cached, so that two NNX graphs with it are equal and compile once.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call_constrained(
            activations, mesh, functools.partial(kind.__call__, self), args, kwargs
        )

    return called_by(kind, call)


def _interceptor(mesh: Mesh, plan: Plan, constrained: Constrained) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        activations = _activations_of(plan, ".".join(context.module.path), constrained)
        return (
            call(*args, **kwargs)
            if activations is None
            else _call_constrained(activations, mesh, call, args, kwargs)
        )

    return intercept


def _activations_of(plan: Plan, name: str, constrained: Constrained) -> Any:
    activations = plan.activation_for(name)
    if activations is None:
        constrained.others[name] = None
    else:
        constrained.modules[name] = activations.rule
    return activations


def _call_constrained(
    activations: Any, mesh: Mesh, call: Any, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Call a module with constrained arguments, and constrain its result."""
    if activations.says("input"):
        positions = {str(index): value for index, value in enumerate(args)}
        by_name = _constrain_leaves(activations, "input", {**positions, **kwargs}, mesh)
        args = [by_name[position] for position in positions]
        kwargs = {name: by_name[name] for name in kwargs}
    result = call(*args, **kwargs)
    return (
        _constrain_leaves(activations, "output", result, mesh)
        if activations.says("output")
        else result
    )


def _constrain_leaves(activations: Any, side: str, value: Any, mesh: Mesh) -> Any:
    named = [(path_name(path), x) for path, x in _leaves(value)]
    shapes = {name: tuple(x.shape) for name, x in named if hasattr(x, "shape")}
    layouts = activations.resolve(side, shapes, mesh)
    leaves = iter(_constrained(x, layouts[name]) if name in layouts else x for name, x in named)
    return jax.tree.map(lambda _: next(leaves), value, is_leaf=_is_leaf)


def _constrained(x: Any, layout: NamedSharding) -> Any:
    """The value with a sharding; a traced one on Auto axes remains on them."""
    return constrain(x, on_value_mesh(x, layout)) if isinstance(x, Tracer) else _moved(x, layout)


_moved = jax.jit(constrain, static_argnums=1)


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(value, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    """Only plain containers are flattened: a module among the arguments is passed as it is."""
    return node is not None and not isinstance(node, tuple | list | dict)


def _check_matched(constrained: Constrained, *, all_called: bool = True) -> None:
    if all_called and not constrained.modules and constrained.others:
        names = listed([*map(repr, constrained.others)], 20)
        raise PlanError(
            "no pattern for activations matches a module that is called; the modules are "
            f"{names} ('' is the model itself)"
        )
