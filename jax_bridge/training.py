"""Training steps that keep a model's sharding: one compiled program, state donated.

>>> import jax.numpy as jnp, optax
>>> from isoshard.core.plan import Plan
>>> mesh = jax.make_mesh((2, 4), ("data", "model"))
>>> loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
>>> step = train_step(loss, optax.sgd(0.1), mesh, Plan({"w": (None, "model")}))
>>> state = step.init(lambda: {"w": jnp.ones((4, 8))})
>>> state, value = step(state, jnp.ones((2, 4)))
>>> float(value), state.params["w"].sharding.spec, int(state.step)
(16.0, P(None, 'model'), 1)

The first argument of the loss is the model: an NNX module, an Equinox module, or a pytree (Linen's
variables). What an NNX module changes while it is called (batch statistics, random state) is kept.

The state remains on the mesh passed, whatever its axis types. The step itself is computed under
Auto axes, so that any model runs, and no byte moves for that. With `explicit=True` the loss is
traced under Explicit axes, and its values have the shardings of their types:

>>> def loss(params, x):
...     hidden = jnp.einsum("bi,io->bo", x, params["w"], out_sharding=P("data", "model"))
...     return (hidden**2).mean()
>>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
...     step = train_step(loss, optax.sgd(0.1), Plan({"w": (None, "model")}), explicit=True)
...     state = step.init(lambda: {"w": jnp.ones((4, 8))})
...     state, value = step(state, jnp.ones((2, 4)))
>>> float(value), jax.typeof(state.params["w"])
(16.0, ShapedArray(float32[4,8@model]))
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.extensions import marked_modules, traced_train_step
from isoshard.core.layout.axis_types import auto, constrain, is_typed, on_mesh
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.mesh import as_mesh, describe_mesh
from isoshard.core.layout.offload import on_device, to_device, to_device_after
from isoshard.core.layout.on_auto_axes import axes_of, hint, on_auto, on_auto_axes
from isoshard.core.plan import Plan
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.runtime import metrics, serialize_virtual
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.core.traced.traced_step import TracedStep
from isoshard.core.transfer import exchange

from .activations import Constrained, constrain_activations
from .create import create_in_shards
from .layout import LEFT_OUT, mesh_first, named_boxes, plan_state, with_types
from .optimizers import opt_state_layouts
from .state_checks import check_layout, check_structure
from .step_batches import StepBatches
from .train_state import TrainState
from .trained_and_rest import ModelParts, join_parts, split_parts, split_result

if TYPE_CHECKING:
    import optax


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Any = LEFT_OUT,
    plan: Any = LEFT_OUT,
    *,
    has_aux: bool = False,
    mutable: bool = False,
    wrt: Any = None,
    donate: bool = True,
    explicit: bool = False,
    uneven: Literal["error", "pad"] = "error",
) -> TrainStep:
    """Make a training step for a model sharded by a plan.

    Args:
        loss_fn: called as `loss_fn(model, *batch)`; returns the loss, a scalar.
        tx: the optimizer.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`train_step(loss_fn, tx, plan)`) where `jax.set_mesh` has set one.
        plan: a `Plan`, or one spec for every parameter. Activations with a rule are constrained
            inside the step (NNX and Linen). Where it has `inputs`, the batch is sharded by them,
            whatever it was before: NumPy arrays, arrays on one device or on the mesh.
        has_aux: whether the loss comes with anything else, as `(loss, aux)`.
        mutable: for Linen: whether it comes with new collections, as `(loss, updates)` or
            `(loss, (updates, aux))`, where `updates` is what `apply(.., mutable=..)` returned.
        wrt: what is trained. For NNX a filter, by default `nnx.Param`; for other models a glob
            over the names of leaves, by default the collection "params" of Linen variables, and
            otherwise every array of floats.
        donate: whether the arrays of the state passed are reused for the state returned.
        explicit: whether the loss is written for the Explicit axes of the mesh (`out_sharding=`,
            `jax.sharding.reshard`, `jax.typeof`): it is then traced as under `jax.set_mesh(mesh)`.
            Otherwise it is traced under Auto axes, also on a mesh with Explicit ones.
        uneven: of rows of a batch (axis 0) that do not divide as the plan's `inputs` split them:
            "error" raises; "pad" repeats rows of NumPy arrays, from the first on, up to the rows of
            the first batch. The loss counts those like the others; a mask comes from
            `iso.data.loader(.., last="pad", mask=..)`.

    Returns:
        The step: `state = step.init(make)`, then `state, loss = step(state, *batch)`, with
        `has_aux` `state, loss, aux`. All of it is on the mesh, with its types.

    Raises:
        ShardingError: there is no mesh, or it has no devices; `explicit` on a mesh that has no
            Explicit axis; `uneven` is something else, or the plan has no `inputs` to pad for.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> from isoshard.core.plan import Plan
        >>> step = train_step(
        ...     lambda model, x: (model(x) ** 2).mean(), optax.adam(1e-3),
        ...     jax.make_mesh((8,), ("x",)), Plan({"kernel": (None, "x")}))
        >>> state = step.init(lambda: nnx.Linear(4, 16, rngs=nnx.Rngs(0)))
        >>> state, loss = step(state, jnp.ones((2, 4)))
        >>> state.model.kernel.sharding.spec, state.opt_state[0].mu["kernel"].sharding.spec
        (P(None, 'x'), P(None, 'x'))
    """
    mesh, plan = mesh_first("iso.train_step(loss_fn, tx, mesh, plan)", mesh, plan)
    mesh = as_mesh(mesh)
    if explicit and not is_typed(mesh):
        raise ShardingError(
            f"explicit=True is for a loss along Explicit axes, and the mesh {describe_mesh(mesh)} "
            "has none: leave it out, or make the mesh with jax.make_mesh."
        )
    options = {"has_aux": has_aux, "mutable": mutable, "wrt": wrt, "donate": donate}
    options |= {"explicit": explicit, "uneven": uneven}
    return TrainStep(loss_fn, tx, mesh, plan, options)


class TrainStep:
    """A training step; made by `train_step`.

    Attributes:
        constrained: the modules whose activations the plan constrained in the last tracing.

    Example:
        >>> import optax
        >>> step = train_step(jnp.sum, optax.sgd(0.1), jax.make_mesh((8,), ("x",)), P("x"))
        >>> state, loss = step(step.start(jnp.ones(8)))
        >>> float(loss), int(state.step)
        (8.0, 1)
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        mesh: Mesh,
        plan: Any,
        options: dict[str, Any],
    ):
        """Use `train_step`."""
        self.constrained: Constrained | None = None
        self._loss_fn = loss_fn
        self._tx = tx
        self._mesh = mesh
        # Without devices: a program with operators that split themselves has one mesh with them.
        self._auto = auto(mesh).abstract_mesh if is_typed(mesh) else mesh
        self._plan = plan if isinstance(plan, Plan) else Plan({"*": plan})
        self._options = options
        self._batches = StepBatches(mesh, self._plan, options["uneven"])
        self._programs: Bounded[Any, Any] = Bounded(PROGRAMS, "jax training steps: programs")
        self._traced = 0
        self._lays_out = True
        self._marks: Callable[[list[Any]], AbstractContextManager[Any]] = nullcontext

    def init(self, make: Callable[..., Any], *args: Any) -> TrainState:
        """Create the model and the optimizer's state, each array directly in its shards.

        Args:
            make: creates the model; traced, as in `create_sharded`.
            *args: arguments of `make`, pytrees of arrays.

        Returns:
            The first state.

        Raises:
            PlanError: the plan does not fit; nothing was computed.
        """
        parts: Any = None

        def state_of(*args: Any) -> Any:
            nonlocal parts
            parts, params, rest = self._split(make(*args))
            return params, rest

        def layouts(shapes: Any) -> Any:
            opt_state = jax.eval_shape(self._tx.init, shapes[0])
            opt_state_layouts(opt_state, shapes[0], self._mesh, self._plan)
            return tuple(plan_state(shape, self._mesh, self._plan) for shape in shapes)

        params, rest = create_in_shards(state_of, layouts, *args)
        return self._first(parts, params, rest)

    def start(self, model: Any) -> TrainState:
        """Begin with a model that exists; it is sharded by the plan.

        Args:
            model: an NNX module, an Equinox module, or a pytree of arrays. With `donate`, the first
                step takes its arrays over, and the model itself is no longer of use.

        Returns:
            The first state.

        Raises:
            PlanError: the plan does not fit.
        """
        parts, params, rest = self._split(model)

        def placed(tree: Any) -> Any:
            layouts = plan_state(tree, self._mesh, self._plan)
            return jax.tree.map(exchange.to_jax, tree, layouts)

        return self._first(parts, placed(params), placed(rest))

    def __call__(self, state: TrainState, *batch: Any) -> tuple[Any, ...]:
        """Make one step.

        Args:
            state: the state; with `donate`, its arrays are deleted.
            *batch: further arguments of the loss, pytrees of arrays. They are sharded by the
                plan's `inputs`; by a plan without them, those in host memory are replicated.

        Returns:
            The next state and the loss, and with `has_aux` what came with the loss.

        Raises:
            ShardingError: arrays of the state are not sharded by the plan, or the loss changed
                the structure of the model; or arrays of the batch do not fit the plan's `inputs`
                (UnevenError: rows do not divide).
        """
        if not isinstance(state.step, Tracer) and state.step.is_deleted():
            raise RuntimeError(
                "this state was donated to an earlier step, which has written over its arrays. Go "
                "on with the state that the step returned: state, loss = step(state, batch); or "
                "keep states with train_step(.., donate=False)"
            )
        batch = self._batches.place(batch)
        program = self._program(state)
        serialize_virtual.wait()
        traced, start = self._traced, time.perf_counter()
        with axes_of(self._mesh):
            result = self._typed(program(state, batch))
        serialize_virtual.note(result[1:2])
        if self._traced > traced:
            cause = "first call" if not traced else "another state or batch: shapes, dtypes, layout"
            seconds = time.perf_counter() - start
            metrics.record_compilation("training step", cause, metrics.user_location(), seconds)
        metrics.count("executions")
        if not self._options["has_aux"]:
            return result[:2]
        return (*result[:2], jax.tree.map(lambda x: with_types(x, self._mesh), result[2]))

    def lower(self, state: TrainState, *batch: Any) -> Any:
        """The step for this state and batch as `jax.jit(..).lower(..)` gives it."""
        batch = self._batches.place(batch)
        with axes_of(self._mesh):
            return self._program(state).lower(state, batch)

    def traced_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any = None
    ) -> TracedStep:
        """Describe the step for planning, on another mesh, which may be over described devices.

        Args:
            args: the state, or the function that creates the model, and the batch; nothing is
                created, and arrays may be shapes.
            kwargs: none.
            mesh: the mesh.
            plan: the plan; by default this step's own.

        Raises:
            PlanError: the plan does not fit.
        """
        plan = self._plan if plan is None else plan
        planned = TrainStep(self._loss_fn, self._tx, mesh, plan, self._options)
        return planned._traced_for(args, mesh, gradients=False)

    def unplanned_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: None = None
    ) -> TracedStep:
        """As `traced_step`, to compare plans: the step's own plan is not applied."""
        planned = TrainStep(self._loss_fn, self._tx, mesh, Plan({}, default=None), self._options)
        planned._lays_out = False
        return planned._traced_for(args, mesh, gradients=True)

    def _traced_for(self, args: tuple[Any, ...], mesh: Mesh, *, gradients: bool) -> TracedStep:
        self._marks = functools.partial(marked_modules, gradients=gradients)
        state = self._described(args[0]) if callable(args[0]) else args[0]
        return traced_train_step(self._step, state, args[1:], mesh, self._plan)

    def _described(self, make: Callable[..., Any]) -> TrainState:
        """The state that `init` would return, with shapes instead of arrays."""

        def state_of() -> TrainState:
            parts, params, rest = self._split(make())
            return TrainState(jnp.int32(0), params, rest, self._tx.init(params), parts)

        return jax.eval_shape(state_of)

    def layouts(self, state: TrainState) -> TrainState:
        """The state with the plan's NamedSharding in place of each array."""
        step: Any = NamedSharding(self._mesh, P())
        params, rest = (plan_state(x, self._mesh, self._plan) for x in (state.params, state.rest))
        moments = opt_state_layouts(state.opt_state, state.params, self._mesh, self._plan)
        return TrainState(step, params, rest, moments, state.parts)

    def _first(self, parts: ModelParts, params: Any, rest: Any) -> TrainState:
        def layouts(shapes: Any) -> Any:
            slots = [name for name, _ in named_leaves(shapes)]
            warn_unused(self._plan, named_boxes(params), named_boxes(rest), slots=slots)
            return opt_state_layouts(shapes, params, self._mesh, self._plan)

        opt_state = create_in_shards(self._tx.init, layouts, params)
        count = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(self._mesh, P()))
        return TrainState(count, params, rest, opt_state, parts)

    def _split(self, model: Any) -> tuple[ModelParts, Any, Any]:
        return split_parts(model, self._options["wrt"])

    def _program(self, state: TrainState) -> Any:
        structure = jax.tree.structure(state)
        program = self._programs.get(structure)
        if program is None:
            layouts = self.layouts(state)
            check_layout(state, layouts)
            program = self._programs[structure] = jax.jit(
                self._step,
                in_shardings=(layouts, None),
                out_shardings=(layouts, NamedSharding(self._mesh, P()), None),
                donate_argnums=0 if self._options["donate"] else (),
            )
        return program

    def _step(self, state: TrainState, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        import optax  # the caller has imported it to make `tx`

        self._traced += 1
        state = dataclasses.replace(state, params=jax.tree.map(to_device, state.params))
        loss_of = jax.value_and_grad(self._loss, has_aux=True)
        if self._options["explicit"]:
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                (loss, (rest, aux)), grads = loss_of(state.params, state, batch)
        else:
            with hint(self._mesh):
                (loss, (rest, aux)), grads = on_auto_axes(loss_of)(state.params, state, batch)
        check_structure(state.rest, rest)

        def updated(state: TrainState, grads: Any, rest: Any) -> TrainState:
            if self._lays_out:
                layouts = plan_state(state.params, self._auto, self._plan)
                layouts = jax.tree.map(on_device, layouts)
                grads = jax.tree.map(constrain, grads, layouts)
            moments = to_device_after(state.opt_state, grads)
            updates, opt_state = self._tx.update(grads, moments, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(state.step + 1, params, rest, opt_state, state.parts)

        return on_auto_axes(updated)(state, grads, rest), on_auto(loss), aux

    def _typed(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Results typed by their shardings: while the caller traces, only types carry them."""
        if not is_typed(self._mesh) or not isinstance(result[1], Tracer):
            return result
        mesh = self._mesh.abstract_mesh
        layouts = self.layouts(result[0]), NamedSharding(mesh, P())
        typed = jax.tree.map(lambda x, to: constrain(x, on_mesh(to, mesh)), result[:2], layouts)
        return (*typed, result[2])

    def _loss(self, params: Any, state: TrainState, batch: tuple[Any, ...]) -> Any:
        model = join_parts(state.parts, params, state.rest)
        models = [model] if state.parts.is_nnx else []
        mesh = self._mesh if self._options["explicit"] else self._auto
        with (
            constrain_activations(mesh, self._plan, *models) as self.constrained,
            self._marks(models),
        ):
            result = self._loss_fn(model, *batch)
        has_aux, mutable = self._options["has_aux"], self._options["mutable"]
        loss, updates, aux = split_result(result, has_aux=has_aux, mutable=mutable)
        if state.parts.is_nnx:
            return loss, (self._split(model)[2], aux)
        return loss, ({**state.rest, **updates} if mutable else state.rest, aux)
