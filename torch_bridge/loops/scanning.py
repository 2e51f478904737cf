"""`scan`: a function over the leading axis of tensors, as one loop of the compiled program.

>>> import torch, isoshard.torch_bridge
>>> def add(total, x):
...     total = total + x
...     return total, total * 10
>>> xs = torch.tensor([1.0, 2.0, 3.0], device="jax", requires_grad=True)
>>> total, seen = scan(add, torch.tensor(0.0, device="jax"), xs)
>>> total, seen.detach()
(tensor(6., device='jax:0', grad_fn=<_ScanBackward>), tensor([10., 30., 60.], device='jax:0'))
>>> seen.sum().backward()
>>> xs.grad
tensor([30., 20., 10.], device='jax:0')

The function's Python code runs once, for the forward and (by torch's autograd) for the backward
loop. What it uses from around it has gradients too, and buffers that it writes to get their new
values. Each step draws random numbers of its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.undocumented import (
    get_autocast_dtype,
    is_autocast_enabled,
)
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.capture.object_walk import modules_of
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.subprograms.closed_over import ClosedOver
from isoshard.torch_bridge.engine.subprograms.scan_loop import ScanLoop, loop_of
from isoshard.torch_bridge.engine.subprograms.traced_vjp import CapturedInput, TracedVjp, aval_of
from isoshard.torch_bridge.engine.subprograms.vjp_entries import VjpNode
from isoshard.torch_bridge.engine.values.value import Aval


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    recompute: bool = False,
    pure: bool = False,
) -> tuple[Any, Any]:
    """Call `fn` for each element of `xs` along its leading axis, handing a carry on.

    The same as this loop, stacked:

    ```
    for x in xs:
        carry, y = fn(carry, x)
        ys.append(y)
    ```

    but that a step has a carry of its own, to write to as it likes (`carry += x`): neither `init`
    nor a `y` from before changes.

    Args:
        fn: `(carry, x) -> (carry, y)`; all of them tensors, or nestings of tensors and None.
        init: the first carry; every carry has its shapes and dtypes.
        xs: tensors of one length on the `jax` device.
        recompute: keep only the carries for backward, and compute the rest again there.
        pure: `fn` is the same whenever it is called: its Python code is not run again for the same
            shapes. Otherwise it runs once in every call of `scan`; either way it is compiled once.

    Returns:
        The last carry, and all `y` stacked along a new leading axis.

    Raises:
        ValueError: `fn` cannot be called, `xs` has no tensor, or lengths differ; or `fn` writes to
            a slice of `xs`.
        TypeError: a leaf is no tensor on the `jax` device, or a carry changes its shape or dtype.
    """
    if not callable(fn):
        raise ValueError(f"scan takes a function fn(carry, x), not {fn!r}")
    carried, sliced = _Leaves(init, "init"), _Leaves(xs, "xs")
    step = _Step(fn, carried, sliced, "the function of a scan", may_write=True)
    return _iterated(step, _length(sliced), recompute, pure)


def iterated(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int,
    *,
    recompute: bool,
    caller: str,
) -> tuple[Any, Any]:
    """`scan` over `length` steps, where `xs` may have no tensors.

    Args:
        fn: see `scan`.
        init: see `scan`.
        xs: tensors of this length.
        length: how many steps there are.
        recompute: see `scan`.
        caller: what `fn` is, for messages.
    """
    step = _Step(fn, _Leaves(init, "init"), _Leaves(xs, "xs"), caller)
    return _iterated(step, length, recompute, pure=False)


def _iterated(step: _Step, length: int, recompute: bool, pure: bool) -> tuple[Any, Any]:
    carried, sliced = step.carried, step.sliced
    wants = torch.is_grad_enabled()
    inputs = [
        CapturedInput(aval_of(leaf), wants and _floats(leaf), carried=True)
        for leaf in carried.tensors
    ]
    inputs += [
        CapturedInput(
            Aval.contiguous(tuple(leaf.shape[1:]), leaf.dtype), wants and leaf.requires_grad
        )
        for leaf in sliced.tensors
    ]
    operands = subtrace.inside([*carried.tensors, *sliced.tensors])
    wants = wants and any(tensor.requires_grad for tensor in operands)
    key = (carried.structure, sliced.structure, tuple(inputs), length, wants, recompute)
    key = (*key, is_autocast_enabled("jax") and get_autocast_dtype("jax"))
    key = (*key, tapes.takes_constants())
    bodies: dict[Any, _Body] = {}
    if pure:
        modules, bodies = _pure_record(step.fn)
        alive = [module for value in modules if (module := value()) is not None]
        key = (*key, tuple([module.training for module in alive]))
    body = bodies.get(key)
    if body is None or not body.closed.is_current():
        body = _body(step, inputs, length, wants, recompute)
        if not body.closed.is_of_this_call():
            bodies[key] = body
    return body.call(operands)


class _Leaves:
    """The tensors of a tree that may have None as well."""

    def __init__(self, tree: Any, name: str):
        pairs, spec = pytree.tree_flatten_with_path(tree)
        self.paths = [pytree.keystr(path) for path, leaf in pairs if leaf is not None]
        self.tensors: list[Any] = [leaf for _, leaf in pairs if leaf is not None]
        self.structure: Any = (spec, tuple([leaf is None for _, leaf in pairs]))
        for path, leaf in zip(self.paths, self.tensors, strict=True):
            if not isinstance(leaf, lazy_tensor.LazyTensor):
                kind = f"on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise TypeError(
                    f"scan takes tensors on the {naming.current().type} device, and "
                    f"{name}{path} is {kind}; move it "
                    f"with {naming.moving()}, or let fn take it from around it"
                )

    def tree(self, tensors: Sequence[Any]) -> Any:
        """The same nesting of other tensors."""
        return _unflatten(self.structure, tensors)


def _unflatten(structure: Any, tensors: Sequence[Any]) -> Any:
    rest = iter(tensors)
    return pytree.tree_unflatten(
        [None if is_none else next(rest) for is_none in structure[1]], structure[0]
    )


def _length(xs: _Leaves) -> int:
    if not xs.tensors:
        raise ValueError("scan needs at least one tensor in xs, whose leading axis it goes along")
    lengths = {}
    for path, leaf in zip(xs.paths, xs.tensors, strict=True):
        if leaf.dim() == 0:
            raise ValueError(f"scan goes along the leading axis of xs, and xs{path} has no axes")
        lengths[f"xs{path}"] = leaf.shape[0]
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name} has {extent}" for name, extent in lengths.items())
        raise ValueError(f"scan needs one length of the leading axes of xs: {text}")
    return xs.tensors[0].shape[0]


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


@dataclasses.dataclass
class _Body:
    """A traced function.

    Attributes:
        loop: both loops.
        carry: how the carry is nested.
        ys: how the results are nested.
        closed: what it takes besides carry and xs.
    """

    loop: ScanLoop
    carry: Any
    ys: Any
    closed: ClosedOver

    def call(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Record the loop."""
        results = self.loop.call(_Scan, self.closed, operands)
        carries, count = self.loop.key.carries, len(results) - len(self.closed.written)
        self.closed.write(map(lazy_tensor.read, results[count:]))
        return (
            _unflatten(self.carry, results[:carries]),
            _unflatten(self.ys, results[carries:count]),
        )


def _body(
    step: _Step, inputs: list[CapturedInput], length: int, wants: bool, recompute: bool
) -> _Body:
    run = TracedVjp(step, inputs, step.caller)
    widths = (len(step.carried.tensors), len(step.sliced.tensors))
    loop = loop_of(run, *widths, length, wants=wants, recompute=recompute)
    closed = ClosedOver.of(run, differentiable=bool(loop.key.differentiable))
    return _Body(loop, step.carried.structure, step.ys, closed)


class _Step:
    """A step of the loop on flat lists of tensors.

    Args:
        fn: `(carry, x) -> (carry, y)`.
        carried: the first carry.
        sliced: what the loop scans over.
        caller: what `fn` is, for messages.
        may_write: whether it may write to its carry, which is a copy then (in name: XLA drops it).

    Attributes:
        ys: how the results of the last step are nested.
    """

    ys: Any

    def __init__(
        self, fn: Any, carried: _Leaves, sliced: _Leaves, caller: str, *, may_write: bool = False
    ):
        """See the class."""
        self.fn, self.carried, self.sliced, self.caller = fn, carried, sliced, caller
        self._may_write = may_write

    def __call__(self, tensors: list[Any]) -> Sequence[Any]:
        """The new carry, and the results."""
        count = len(self.carried.tensors)
        carry = [t.clone() for t in tensors[:count]] if self._may_write else tensors[:count]
        result = self.fn(self.carried.tree(carry), self.sliced.tree(tensors[count:]))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(
                f"{self.caller} must return (carry, y), and returned {type(result).__name__}; y "
                "may be None"
            )
        new, ys = _Leaves(result[0], "the new carry"), _Leaves(result[1], "y")
        _check_carry(self.carried, new)
        self.ys = ys.structure
        return [*new.tensors, *ys.tensors]


def _check_carry(before: _Leaves, after: _Leaves) -> None:
    if before.structure != after.structure:
        raise TypeError(
            "the function of a scan must return a carry like the one it takes, and it takes "
            f"{_names(before)} and returns {_names(after)}"
        )
    errors = [
        f"init{path} is {_text(old)}, the new one {_text(new)}"
        for path, old, new in zip(before.paths, before.tensors, after.tensors, strict=True)
        if old.shape != new.shape or old.dtype != new.dtype
    ]
    if errors:
        raise TypeError(
            "the function of a scan must keep the shapes and dtypes of the carry: "
            f"{'; '.join(errors)}"
        )


def _names(leaves: _Leaves) -> str:
    return " ".join(str(leaves.structure[0]).split())


def _text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


_Pure = tuple[list[weakref.ref[torch.nn.Module]], Bounded[Any, _Body]]
_PURE: weakref.WeakKeyDictionary[Any, _Pure] = weakref.WeakKeyDictionary()


def _pure_record(fn: Any) -> _Pure:
    """The modules that a function uses, and its recorded bodies."""
    recorded = _PURE.get(fn)
    if recorded is None:
        # Not the modules themselves: one that has `fn` would keep it, and so this entry, for ever.
        modules = [weakref.ref(module) for module in modules_of(fn)]
        recorded = _PURE[fn] = (modules, Bounded(PROGRAMS, "scan: recorded bodies"))
    return recorded


class _Scan(VjpNode):
    refusal = (
        "scan has no gradients of gradients (create_graph=True); for those, run the steps, or the "
        "layers, one after the other in Python"
    )
