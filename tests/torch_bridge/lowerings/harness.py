"""Compare lowerings with CPU torch, without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from isoshard.torch_bridge import lowerings  # noqa: F401  (fills the table)
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def to_array(tensor: torch.Tensor) -> jax.Array:
    """Copy a CPU tensor to JAX in its physical dtype."""
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy()).astype("bfloat16")
    return jax.numpy.asarray(tensor.numpy().astype(physical_dtype(tensor.dtype)))


def evaluate(op: torch._ops.OpOverload, *args, key=None, **kwargs) -> list:
    """Run the lowering of `op` on CPU tensors' values; arrays come back as a list."""
    return evaluate_all([(op, args, kwargs)], key=key)[0]


def evaluate_all(calls: list[Call], *, key=None, lifted: bool = False) -> list[list]:
    """Run lowerings as one program: most of the time of a small program is compiling it.

    Args:
        calls: operators and their arguments.
        key: of what draws random numbers.
        lifted: whether floats are inputs of the program, as the engine makes them.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # as the engine does
        bound, inputs = [], []
        for op, args, kwargs in calls:
            tensors: list[torch.Tensor] = []
            numbers: list[float] = []

            def slot(leaf, tensors=tensors, numbers=numbers):
                if isinstance(leaf, torch.Tensor):
                    tensors.append(leaf)
                    return Slot(len(tensors) - 1)
                if lifted and isinstance(leaf, float):
                    numbers.append(leaf)
                    return Lift(len(numbers) - 1)
                return leaf

            args = tuple(map_leaves(slot, arg) for arg in args)
            kwargs = {name: map_leaves(slot, value) for name, value in kwargs.items()}
            metas = tuple(Meta.of(t) for t in tensors)
            outs = infer(op, args, kwargs, metas, numbers)
            bound.append(build_call(op, args, kwargs, metas, outs=outs))
            inputs.append(([to_array(t) for t in tensors], [np.float64(n) for n in numbers]))
        return jax.jit(
            lambda inputs: [call(*given, key) for call, given in zip(bound, inputs, strict=True)]
        )(inputs)


@contextlib.contextmanager
def together(*, lifted: bool = False, **close: float) -> Iterator[Callable[..., None]]:
    """Collect calls of `check`; all run as one program at the end, and are compared.

    ```
    with together() as check:
        for x in (FLOATS, INTS):
            check(aten.abs.default, x)
    ```
    """
    calls: list[Call] = []
    wanted = []

    def check(op: torch._ops.OpOverload, *args, rtol=None, atol=None, **kwargs) -> None:
        """Assert that the lowering of `op` equals CPU torch: shapes, dtypes and values."""
        want = op(*map_leaves(_clone, args), **kwargs)
        near = {"rtol": 2e-5, "atol": 2e-5} | close
        near |= {} if rtol is None else {"rtol": rtol}
        near |= {} if atol is None else {"atol": atol}
        calls.append((op, tuple(map_leaves(_clone, arg) for arg in args), kwargs))
        wanted.append((list(want) if isinstance(want, tuple | list) else [want], near))

    yield check
    results = evaluate_all(calls, lifted=lifted)
    for (op, args, kwargs), got, (want, near) in zip(calls, results, wanted, strict=True):
        _compare(got, want, near, lambda op=op, a=args, k=kwargs: f"{op}{a}{k}")


def check(op: torch._ops.OpOverload, *args, **kwargs) -> None:
    """Assert that the lowering of `op` equals CPU torch, in a program of its own."""
    with together() as check:
        check(op, *args, **kwargs)


def _compare(got: list, want: list, near: dict[str, float], describe: Callable[[], str]) -> None:
    assert len(got) == len(want), describe()
    for g, w in zip(got, want, strict=True):
        if w is None:
            assert g is None, describe()
            continue
        assert (tuple(g.shape), g.dtype) == (tuple(w.shape), physical_dtype(w.dtype)), describe()
        have = np.asarray(g.astype("float32") if g.dtype == "bfloat16" else g)
        wish = (w.float() if w.dtype == torch.bfloat16 else w).detach().numpy()
        try:
            np.testing.assert_allclose(have, wish, **near)
        except AssertionError as error:
            raise AssertionError(f"{describe()}\n{error}") from None


def _clone(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def as_cpu(cases: Mapping[str, tuple[Any, ...]], *, half: float = 2e-2, **close: float) -> None:
    """Values and gradients of functions on the device equal those of CPU torch.

    All are one program on the device.

    Args:
        cases: by name, a function of tensors, and its operands.
        half: tolerance for 16 bits.
        **close: `rtol` and `atol` for others.
    """
    got, want = ({n: _pulled(d, *case) for n, case in cases.items()} for d in ("jax", "cpu"))
    assert cases
    for name in cases:
        for g, w in zip(got[name], want[name], strict=True):
            assert (g is None) == (w is None), name
            if w is not None:
                near = {"rtol": 1e-4, "atol": 1e-5} | close
                near = near if w.element_size() > 2 else {"rtol": half, "atol": half}
                describe = lambda text, name=name: f"{name}: {text}"  # noqa: E731
                torch.testing.assert_close(g.cpu(), w, equal_nan=True, msg=describe, **near)


def _pulled(device: str, function: Callable[..., Any], *operands: torch.Tensor) -> list:
    """Results, and gradients of the operands for cotangents that differ for every element."""
    leaves = [operand.detach().clone().to(device) for operand in operands]
    inputs = [x.requires_grad_() for x in leaves if x.is_floating_point() or x.is_complex()]
    outs = [x for x in pytree.tree_leaves(function(*leaves)) if isinstance(x, torch.Tensor)]
    roots = [out for out in outs if out.requires_grad]
    steps = [torch.linspace(-1, 2, root.numel()).reshape(root.shape) for root in roots]
    weights = [step.to(root.dtype).to(device) for step, root in zip(steps, roots, strict=True)]
    grads = torch.autograd.grad(roots, inputs, weights, allow_unused=True) if roots else ()
    return [*(out.detach() for out in outs), *grads]
