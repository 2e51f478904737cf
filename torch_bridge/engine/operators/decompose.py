"""torch's own decompositions, run on tracers while a program is compiled.

An operator without a lowering is still one entry of the tape. When the tape is compiled, torch's
Python decomposition runs once on tensors that hold tracers, and each operator it calls is lowered
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge._torch_internals.dispatcher import decompositions, has_kernel
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves
from isoshard.torch_bridge.engine.values.value import Aval, Value


def is_composite(op: OpOverload) -> bool:
    """Whether torch itself composes the operator of others (CompositeImplicitAutograd)."""
    return has_kernel(op.name(), "CompositeImplicitAutograd")


def find(op: OpOverload) -> Any:
    """A function that computes `op` from its decomposition, or None."""
    function = decompositions.get(op)
    if function is None and is_composite(op):
        function = op.decompose
    if function is None:  # the primitives that torch's reference implementations are made of
        function = getattr(op, "impl_aten", None)
    if function is None:
        return None

    def run(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metas: tuple[Meta, ...],
        inputs: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
        key: jax.Array | None,
    ) -> Any:
        tensors = [
            lazy_tensor.fresh(Aval.of(meta), Value.handed(array))
            for meta, array in zip(metas, inputs, strict=True)
        ]

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            if isinstance(leaf, Lift):
                return lazy_tensor.fresh(
                    Aval.contiguous((), torch.float32), Value(scalars[leaf.index])
                )
            return leaf

        with tapes.immediately(), torch.no_grad():
            outputs = function(
                *(map_leaves(real, arg) for arg in args),
                **{name: map_leaves(real, value) for name, value in kwargs.items()},
            )
            return _arrays(outputs)

    return run


def _arrays(outputs: Any) -> Any:
    if isinstance(outputs, list | tuple):
        return tuple(_arrays(output) for output in outputs)
    return None if outputs is None else lazy_tensor.read(outputs).array
