"""Sharding constraints on the activations of a torch module, by module name.

>>> import isoshard.torch_bridge as xs
>>> from isoshard import P, Plan, make_mesh
>>> mesh = make_mesh((2, 4), ("dp", "tp"))
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).to("jax")
>>> plan = Plan(activations={"0": P("dp", "tp")})
>>> with xs.constrain_activations(model, mesh, plan):
...     model[0](torch.ones(2, 4, device="jax")).sharding_spec
'{devices=[2,4]0,1,2,3,4,5,6,7}'
>>> model[0](torch.ones(2, 4, device="jax")).sharding_spec
''

The model's code is not changed: hooks constrain what the plan names, and its gradients, whenever
the modules are called: in steps of `xs.compile`, under `isoshard.jax_function`, and in the loops of
`scan_layers`, if all layers have equal hooks. A step that was captured before does not notice hooks
that are added or removed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout import axis_types
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.plan import Plan
from isoshard.core.plan.activations import ModuleActivations, Side
from isoshard.core.plan.layout_rules import PlanError
from isoshard.core.plan.unused_rules import check_activation_axes, warn_unused_activations
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike, PlanLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval

from .gradients import mark_sharding_with_gradients

_SHOWN = 20


class ActivationConstraints:
    """The constraints that `constrain_activations` put on a module, until they are removed.

    A context manager: leaving it removes them.

    Args:
        module: as for `constrain_activations`.
        mesh: a `jax.sharding.Mesh`.
        plan: a `Plan` with activations.

    Attributes:
        modules: the activation rules of each module that has some, by name.

    Raises:
        PlanError: no rule matches a module.

    Example:
        >>> from isoshard import P, make_mesh
        >>> mesh = make_mesh((8,), ("tp",))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> constraints = constrain_activations(model, mesh, {"0": P(None, "tp")})
        >>> constraints
        ActivationConstraints('0' by '0')
        >>> constraints.remove()
    """

    def __init__(self, module: torch.nn.Module, mesh: Mesh, plan: Plan):
        """See `constrain_activations`."""
        check_activation_axes(plan, mesh)
        self.modules: dict[str, ModuleActivations] = {}
        self._handles: list[Any] = []
        constrained = []
        for name, child in module.named_modules():
            rules = plan.activation_for(name)
            if rules is not None:
                self.modules[name] = rules
                constrained.append((child, rules))
        if not constrained:
            names = [repr(name) for name, _ in module.named_modules()]
            raise PlanError(
                f"no activation rule of the plan matches a module of {type(module).__name__}; its "
                f"modules are {', '.join(names[:_SHOWN])}{', ..' if len(names) > _SHOWN else ''}"
            )
        warn_unused_activations(plan, [name for name, _ in module.named_modules()])
        for child, rules in constrained:
            if rules.says("input"):
                before: Any = functools.partial(_before, rules=rules, mesh=mesh)
                before = _constraint(before, "input", rules, mesh)
                self._handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
            if rules.says("output"):
                after: Any = functools.partial(_after, rules=rules, mesh=mesh)
                after = _constraint(after, "output", rules, mesh)
                self._handles.append(child.register_forward_hook(after))

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> ActivationConstraints:
        """These constraints."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Remove them."""
        self.remove()

    def __repr__(self) -> str:
        """Module names with the patterns that match them."""
        pairs = ", ".join(f"{name!r} by {rules.rule!r}" for name, rules in self.modules.items())
        return f"ActivationConstraints({pairs})"


def constrain_activations(
    module: torch.nn.Module, mesh: MeshLike, plan: PlanLike
) -> ActivationConstraints:
    """Constrain the inputs and outputs of the modules of a model to the shardings of a plan.

    Args:
        module: on the `jax` device when it is called. It gets forward hooks, and nothing else.
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh` of any axis types.
        plan: a `Plan` with activations, or a mapping from patterns of module names to what
            `Plan(activations=..)` takes.

    Returns:
        A handle with `remove()`, also for `with`.

    Raises:
        PlanError: no rule matches a module. When a module is called: a spec does not fit the
            tensor, or there is no tensor at a path; the message lists all of them.
        ShardingError: when a module is called: a tensor is on another device.

    Example:
        >>> from isoshard import P, make_mesh
        >>> linear = torch.nn.Linear(4, 8).to("jax")
        >>> with constrain_activations(linear, make_mesh((8,), ("tp",)), {"": P(None, "tp")}):
        ...     linear(torch.ones(2, 4, device="jax")).partition_spec
        P(None, 'tp')
    """
    plan = plan if isinstance(plan, Plan) else Plan(activations=plan)
    return ActivationConstraints(module, as_mesh(mesh), plan)


def _constraint(hook: Any, side: Side, rules: ModuleActivations, mesh: Mesh) -> Any:
    """The hook with a key by which `scan_layers` compares hooks; module names are not in it."""
    hook.constraint_key = (side, mesh, rules.parts)
    return hook


def _before(
    module: torch.nn.Module, args: Any, kwargs: Any, *, rules: ModuleActivations, mesh: Mesh
) -> Any:
    named = {str(index): arg for index, arg in enumerate(args)}
    inputs = _constrain_tree({**named, **kwargs}, "input", rules, mesh)
    return tuple(inputs[name] for name in named), {name: inputs[name] for name in kwargs}


def _after(
    module: torch.nn.Module, args: Any, output: Any, *, rules: ModuleActivations, mesh: Mesh
) -> Any:
    return _constrain_tree(output, "output", rules, mesh)


def _constrain_tree(tree: Any, side: Side, rules: ModuleActivations, mesh: Mesh) -> Any:
    pairs, structure = pytree.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in pairs]
    indices = {
        ".".join(map(_key, path)): index
        for index, (path, leaf) in enumerate(pairs)
        if isinstance(leaf, torch.Tensor)
    }
    shapes = {path: tuple(leaves[index].shape) for path, index in indices.items()}
    for path, sharding in rules.resolve(side, shapes, mesh).items():
        tensor = leaves[indices[path]]
        if not isinstance(tensor, lazy_tensor.LazyTensor):
            raise ShardingError(
                f"the {f'{side} {path}'.rstrip()} of module {rules.module!r} is to be "
                f"sharded as {sharding.spec}, and it is on {tensor.device}; move the model and its "
                f"inputs with {naming.moving()}"
            )
        leaves[indices[path]] = _constrained(tensor, sharding)
    return pytree.tree_unflatten(leaves, structure)


def _key(key: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _constrained(tensor: torch.Tensor, sharding: NamedSharding) -> Any:
    if P.UNCONSTRAINED in sharding.spec:
        return _Open.apply(tensor, sharding)
    return mark_sharding_with_gradients(tensor, sharding.mesh, sharding.spec)


class _Open(torch.autograd.Function):
    """`_Open.apply(tensor, sharding)`: a constraint with axes that are unconstrained."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, sharding: NamedSharding) -> torch.Tensor:
        ctx.sharding = sharding
        tape = tapes.recorder()
        mesh_id = sharding_ids.intern(NamedSharding(sharding.mesh, P()))
        value = lazy_tensor.read(tensor)
        if isinstance(tape, tapes.Tape) and tape.joins(mesh_id):
            tape.marks.add(mesh_id)
        (result,) = tape.record(_open(sharding), (value,))
        return lazy_tensor.fresh(Aval.contiguous(tuple(tensor.shape), tensor.dtype), result)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Open.apply(gradient[0], ctx.sharding), None


@cached(1024)
def _open(sharding: NamedSharding) -> Recipe:
    constrain = functools.partial(axis_types.constrain, sharding=sharding)
    return Recipe("mark_along", lambda arrays, _scalars, _key: [constrain(arrays[0])], 1)
