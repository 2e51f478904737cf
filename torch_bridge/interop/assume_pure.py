"""Torch code that is recorded once, and then is one entry of every program that calls it.

Recording an operation costs some microseconds each time. A function that depends on its arguments
alone need not be run again for the same shapes: a call of it is a single entry, with the VJP that
torch's autograd gives it.

>>> import torch, isoshard.torch_bridge
>>> runs = []
>>> @assume_pure
... def norm(x, axis=-1):
...     runs.append(1)
...     return x / x.square().sum(axis, keepdim=True).sqrt()
>>> x = torch.tensor([[3.0, 4.0]], device="jax", requires_grad=True)
>>> for _ in range(5):
...     y = norm(x)
>>> y
tensor([[0.6000, 0.8000]], device='jax:0', grad_fn=<_PureBackward>)
>>> len(runs)
1
>>> norm(x)[0, 0].backward()
>>> x.grad
tensor([[ 0.1280, -0.0960]], device='jax:0')

Tensors that the function closes over (a module's parameters) are read anew in each call, and have
gradients; a tensor put in their place later is not noticed, so pass such tensors as arguments.
In-place changes to tensors that need no gradient (the statistics of BatchNorm) happen in each call.
Random numbers are new ones in each call, but not those of the plain function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.core.runtime.exact_keys import exact
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.undocumented import (
    get_autocast_dtype,
    is_autocast_enabled,
)
from isoshard.torch_bridge.engine.capture.object_walk import modules_of
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.subprograms.closed_over import ClosedOver
from isoshard.torch_bridge.engine.subprograms.recorded_call import RecordedCall, call_of
from isoshard.torch_bridge.engine.subprograms.traced_vjp import CapturedInput, TracedVjp
from isoshard.torch_bridge.engine.subprograms.vjp_entries import VjpNode
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval


class Pure:
    """A function that is recorded once for all arguments of equal shapes; see `assume_pure`."""

    def __init__(self, function: Callable[..., Any], *, seeded: bool = False):
        """See `assume_pure`."""
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._seeded = seeded
        self._recordings: Bounded[Any, _Recorded] = Bounded(PROGRAMS, "assume_pure: recordings")
        self._modules: list[torch.nn.Module] | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the object is an argument like others, and must be hashable."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it.

        Raises:
            TypeError: an argument is neither a tensor nor hashable, or `rng_seed` is missing.
            ValueError: the function hides a gradient, or writes to a tensor that requires one.
        """
        seed = self._seed(kwargs) if self._seeded else []
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tapes.is_tracing() or not all(
            isinstance(tensor, lazy_tensor.LazyTensor) for tensor in tensors
        ):
            return self._plainly(seed, args, kwargs)
        tensors = subtrace.inside(tensors)
        fixed = tuple([_fixed(leaf) for leaf in leaves])
        wants = torch.is_grad_enabled()
        inputs = tuple(
            [CapturedInput(tensor._aval, wants and tensor.requires_grad) for tensor in tensors]
        )
        key = (structure, fixed, inputs, wants, *self._modes())
        try:
            recorded = self._recordings.get(key)
        except TypeError as error:
            raise TypeError(
                f"a pure function takes tensors and hashable arguments: {error}"
            ) from None
        if recorded is None or not recorded.closed.is_current():
            recorded = self._record(leaves, structure, inputs)
            if recorded.is_reusable():
                self._recordings[key] = recorded
        return recorded.call(tensors, seed)

    def _seed(self, kwargs: dict[str, Any]) -> list[Any]:
        seed = kwargs.pop("rng_seed", None)
        if seed is None:
            raise TypeError(
                f"{self._function} draws its random numbers from a seed: pass rng_seed=.., an int "
                "or a tensor of one integer"
            )
        if isinstance(seed, torch.Tensor):
            return [seed]
        host = torch.tensor(seed, dtype=torch.int64)
        return [lazy_tensor.fresh(Aval.contiguous((), torch.int64), lazy_tensor.host_value(host))]

    def _plainly(self, seed: list[Any], args: Any, kwargs: Any) -> Any:
        """Call the function itself: on other devices, and while JAX traces."""
        if not seed:
            return self._function(*args, **kwargs)
        with torch.random.fork_rng(device_type="cpu", devices=[]):
            torch.manual_seed(int(seed[0]))
            return self._function(*args, **kwargs)

    def _modes(self) -> tuple[Any, ...]:
        """State that the function's Python code may read besides its arguments."""
        modules = self._modules
        if modules is None:
            modules = self._modules = modules_of(self._function)
        return (
            tuple([module.training for module in modules]),
            is_autocast_enabled("jax") and get_autocast_dtype("jax"),
        )

    def _record(
        self, leaves: list[Any], structure: Any, inputs: Sequence[CapturedInput]
    ) -> _Recorded:
        outputs: list[Any] = [None, None]
        name = getattr(self._function, "__name__", type(self._function).__name__)

        def code(tensors: list[Any]) -> Sequence[Any]:
            operands = iter(tensors)
            filled = [next(operands) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, structure)
            results, outputs[1] = pytree.tree_flatten(self._function(*args, **kwargs))
            outputs[0] = [
                _FREE if isinstance(result, torch.Tensor) else result for result in results
            ]
            return [result for result in results if isinstance(result, torch.Tensor)]

        run = TracedVjp(code, inputs, f"the pure function {name}", may_write=True)
        wants = any(aval.needs_grad for aval in inputs)
        entry = call_of(run, name, wants=wants, seeded=self._seeded)
        return _Recorded(
            entry,
            outputs[0],
            outputs[1],
            list(run.annotations),
            ClosedOver.of(run, differentiable=bool(entry.key.differentiable)),
            [index for index, _ in run.changed],
        )


def assume_pure(
    fn: Callable[..., Any], *, add_rng_seed_argument: bool = False
) -> Callable[..., Any]:
    """Promise that a function's results depend on its arguments alone.

    Args:
        fn: takes and returns tensors on the `jax` device, in any nesting, and hashable values.
        add_rng_seed_argument: the new function takes `rng_seed=` as well, an int or an integer
            tensor, and with the same seed draws the same random numbers.

    Returns:
        A function with the same results, whose Python code runs once for each combination of
        shapes, dtypes and other arguments. On other devices it is `fn`.
    """
    if not callable(fn):
        raise TypeError(f"assume_pure takes a function, not {type(fn).__name__}")
    return Pure(fn, seeded=add_rng_seed_argument)


class PureModule(torch.nn.Module):
    """A module that is recorded once for arguments of equal shapes and dtypes.

    >>> layer = PureModule(torch.nn.Linear(3, 2).to("jax"))
    >>> layer(torch.ones(4, 3, device="jax")).shape
    torch.Size([4, 2])
    >>> [name for name, _ in layer.named_parameters()]
    ['_module.weight', '_module.bias']

    Its parameters and buffers are inputs of what is recorded, so others may be put in their place.

    Args:
        module: its result depends on parameters, buffers and arguments alone.
    """

    def __init__(self, module: torch.nn.Module):
        """See the class."""
        super().__init__()
        self._module = module
        vars(self)["_forward"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's."""
        if vars(self).get("_forward") is None:
            vars(self)["_forward"] = Pure(functools.partial(_functional, self._module))
        params = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        return vars(self)["_forward"](params, buffers, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Copies record anew."""
        return {**vars(self), "_forward": None}


def _functional(module: torch.nn.Module, params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
    return torch.func.functional_call(module, (params, buffers), args, kwargs)


class _Free:
    """The placeholder of a tensor in a tree whose other leaves are kept."""


_FREE = _Free()


def _fixed(leaf: Any) -> Any:
    return _FREE if isinstance(leaf, torch.Tensor) else exact(leaf)


@dataclasses.dataclass
class _Recorded:
    """A function that was recorded.

    Attributes:
        entry: its entries on a tape, forward and backward.
        leaves: its results that are no tensors, and a `_Free` for each tensor.
        structure: how the results are nested.
        annotations: how each tensor among them was marked.
        closed: the tensors that it closes over.
        changed: indices of the arguments that it writes to.
    """

    entry: RecordedCall
    leaves: list[Any]
    structure: Any
    annotations: list[Any]
    closed: ClosedOver
    changed: list[int]

    def is_reusable(self) -> bool:
        """Whether later calls may use it: it has no value of this call alone."""
        for original in self.closed.originals:
            if original.grad_fn is not None:
                raise ValueError(
                    f"a pure function closes over a tensor of shape {tuple(original.shape)} that "
                    "was computed from others which require a gradient; pass it as an argument"
                )
        return not self.closed.is_of_this_call()

    def call(self, tensors: Sequence[Any], seed: list[Any]) -> Any:
        """Record a call."""
        results = self.entry.call(_Pure, self.closed, tensors, *seed)
        count = len(self.annotations)
        changed = len(results) - len(self.changed)
        with torch.no_grad():
            self.closed.write(map(lazy_tensor.read, results[count:changed]))
            for index, new in zip(self.changed, results[changed:], strict=True):
                tensors[index].copy_(new)
        for result, annotation in zip(results, self.annotations, strict=False):
            if annotation is not None:
                result._storage.annotation = annotation
                result._storage.value.layout = sharding_ids.intern(annotation)
        tensors_left = iter(results)
        filled = [next(tensors_left) if leaf is _FREE else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(filled, self.structure)


class _Pure(VjpNode):
    refusal = (
        "a pure function has no gradients of gradients (create_graph=True); call the function "
        "itself for those"
    )
