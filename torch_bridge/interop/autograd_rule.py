"""The rule of one call of a `torch.autograd.Function` in JAX; see `own_gradients`.

`forward` and `backward` are traced apart, so what goes from one to the other is taken out of the
context: tensors become residuals of JAX, and the rest stays with the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.argument_types import AutogradFunction
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.values.value import Value

from .convert import array_of, keys, unwrap, wrap


def pull_of(cls: AutogradFunction) -> Callable[..., Any] | None:
    """The backward that a class defines, under either of its names; None if there is none."""
    for name in ("backward", "vjp"):
        defined = getattr(cls, name)
        if defined is not getattr(torch.autograd.Function, name):
            return defined
    return None


class RuleContext:
    """What `forward` and `backward` are given as `ctx`; attributes go from one to the other.

    Attributes:
        needs_input_grad: for each argument, whether it can have a gradient.
        saved_tensors: what `save_for_backward` was given.
        constant: ids of the results that have no gradient.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        """An empty one."""
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: tuple[int, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors, or None."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing: forward mode is refused."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Nothing: writes to arguments are seen."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Let results have no gradient; `backward` is given zeros for them."""
        self.constant = tuple(map(id, tensors))

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: JAX has zeros where torch has None."""


class _RuleCall:
    """One call of a function.

    Attributes:
        kinds: for each result: the number of the argument that it is, the dtype of a new tensor,
            or None for what is no tensor.
        others: those results.
        alone: `forward` gave no tuple.
        constant: for each result, whether it has no gradient.
        changed: numbers of the arguments that were written to, and not returned.
        rule: the call in JAX: takes a key or None, and the arguments that are tensors.
    """

    kinds: list[int | torch.dtype | None]
    others: list[Any]
    alone: bool
    constant: list[bool]
    changed: list[int]

    def __init__(self, cls: Any, args: tuple[Any, ...]):
        self._class, self._args = cls, args
        self._has_setup = cls.setup_context is not torch.autograd.Function.setup_context
        self.numbers = [n for n, one in enumerate(args) if isinstance(one, lazy_tensor.LazyTensor)]
        self._needs = tuple([n in self.numbers and _floats(one) for n, one in enumerate(args)])
        self._kept: Any = None
        self.rule = jax.custom_vjp(self.primal)
        self.rule.defvjp(self.forward, self.backward)

    def draws(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether `forward` draws random numbers: a key that is taken counts as used."""
        taken: list[int] = []

        def probe() -> Iterator[jax.Array]:
            while True:
                taken.append(1)
                yield jax.random.key(0)

        def run(*given: jax.Array) -> list[jax.Array]:
            with tapes.immediately(probe(), imports=True), torch.no_grad():
                return self._run(RuleContext(self._needs), given)

        jax.eval_shape(run, *arrays)
        return bool(taken)

    def primal(self, rng: jax.Array | None, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The tensors among the results, then the written arguments."""
        with tapes.immediately(keys(rng), imports=True), torch.no_grad():
            return self._run(RuleContext(self._needs), arrays)

    def forward(self, rng: jax.Array | None, arrays: Sequence[jax.Array]) -> tuple[Any, Any]:
        """The same, and what the context keeps.

        The results come from the rule itself, so that gradients of gradients follow it as well;
        what is computed twice here, XLA computes once.
        """
        context = RuleContext(self._needs)
        results = self.rule(rng, arrays)
        with tapes.immediately(keys(rng), imports=True), torch.no_grad():
            again = self._run(context, arrays)
            own = {id(one): result for one, result in zip(again, results, strict=True)}
            leaves, structure = pytree.tree_flatten(vars(context))
            kept = [unwrap(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            kept = [own.get(id(one), one) for one in kept]
        fixed = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kept = (structure, fixed, rest)
        return results, (rng, kept)

    def backward(self, residuals: Any, gradients: Sequence[jax.Array]) -> tuple[Any, Any]:
        """The gradients of the arguments that are tensors."""
        rng, kept = residuals
        if rng is not None:
            rng = jax.random.fold_in(rng, 1)
        with tapes.immediately(keys(rng), imports=True), torch.no_grad():
            structure, fixed, rest = self._kept
            arrays = iter(kept)
            leaves = [
                other if dtype is None else wrap(jnp.asarray(next(arrays)), dtype)
                for dtype, other in zip(fixed, rest, strict=True)
            ]
            context = RuleContext(self._needs)
            vars(context).update(pytree.tree_unflatten(leaves, structure))
            pull: Any = pull_of(self._class)
            given = self._cotangents(gradients)
            boxed = getattr(self._class, "boxed_grads_call", False)
            found = pull(context, given) if boxed else pull(context, *given)
            found = list(found) if isinstance(found, tuple) else [found]
            if len(found) < len(self._args):
                raise RuntimeError(
                    f"{self._class.__name__}.backward returned {len(found)} gradients for "
                    f"{len(self._args)} arguments of forward; return one for each, None for what "
                    "is no tensor"
                )
            return None, [self._gradient(number, found[number]) for number in self.numbers]

    def _run(self, context: RuleContext, given: Sequence[jax.Array]) -> list[jax.Array]:
        args = list(self._args)
        arrays = [jnp.asarray(one) for one in given]  # JAX hands scalars of its own kind on
        for number, array in zip(self.numbers, arrays, strict=True):
            args[number] = wrap(array, args[number].dtype)
        if self._has_setup:
            found = self._class.forward(*args)
            self._class.setup_context(context, tuple(args), found)
        else:
            found = self._class.forward(context, *args)
        self.alone = not isinstance(found, tuple)
        results = [found] if self.alone else list(found)
        inputs = {id(args[number]): number for number in self.numbers}
        written = [
            number
            for number, array in zip(self.numbers, arrays, strict=True)
            if array_of(args[number]) is not array
        ]
        self.constant = [id(one) in context.constant for one in results]
        self.kinds, self.others = [], []
        for one in results:
            if not isinstance(one, torch.Tensor):
                self.kinds.append(None)
                self.others.append(one)
            else:
                number = inputs.get(id(one))
                self.kinds.append(number if number in written else one.dtype)
        self.changed = [number for number in written if number not in self.kinds]
        tensors = [one for one in results if isinstance(one, torch.Tensor)]
        return [unwrap(one) for one in (*tensors, *(args[number] for number in self.changed))]

    def _cotangents(self, gradients: Sequence[jax.Array]) -> list[Any]:
        given = iter(gradients)
        found: list[Any] = []
        for kind in self.kinds:
            if kind is None:
                found.append(None)
                continue
            dtype = self._args[kind].dtype if isinstance(kind, int) else kind
            gradient = next(given)
            if gradient.dtype == jax.dtypes.float0:
                found.append(wrap(jnp.zeros(gradient.shape, jnp.bool_), dtype))
            else:
                found.append(wrap(jnp.conj(gradient), dtype))
        return found

    def _gradient(self, number: int, gradient: Any) -> jax.Array | None:
        """Torch's gradient of a complex number is the conjugate of JAX's."""
        argument = self._args[number]
        if gradient is None or not self._needs[number]:
            return None
        gradient = gradient.to("jax").sum_to_size(argument.shape).to(argument.dtype)
        return jnp.conj(array_of(gradient))


def called(cls: AutogradFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function under JAX's rule for it.

    Args:
        cls: the function's class.
        args: tensors on the `jax` device, and anything else.
        kwargs: where the class has a `setup_context`.

    Returns:
        As `cls.apply`.
    """
    if cls.setup_context is not torch.autograd.Function.setup_context:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    call = _RuleCall(cls, args)
    here: Any = tapes.recorder()
    draw = here.keys
    given = [array_of(args[number]) for number in call.numbers]
    rng = next(draw) if draw is not None and call.draws(given) else None
    arrays = iter(call.rule(rng, given))
    others = iter(call.others)
    results = []
    for kind, constant in zip(call.kinds, call.constant, strict=True):
        if kind is None:
            results.append(next(others))
            continue
        array = jax.lax.stop_gradient(next(arrays)) if constant else next(arrays)
        if isinstance(kind, int):
            lazy_tensor.write(args[kind], Value.handed(array))
            results.append(args[kind])
        else:
            results.append(wrap(array, kind))
    for number in call.changed:
        lazy_tensor.write(args[number], Value.handed(jax.lax.stop_gradient(next(arrays))))
    return results[0] if call.alone else tuple(results)


def _floats(tensor: Any) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
