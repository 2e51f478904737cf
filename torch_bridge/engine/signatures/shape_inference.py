"""What torch promises of an operator's results: it is run on `meta` tensors.

A lowering can then not disagree with torch without an error.

>>> import torch
>>> x = Meta((2, 3), (3, 1), torch.int64)
>>> infer(torch.ops.aten.mul.Tensor, (Slot(0), 2.5), {}, (x,))
(Meta(size=(2, 3), stride=(3, 1), dtype=torch.float32),)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves
from isoshard.torch_bridge.lowerings import registry

from . import checks
from .shape_checks import as_kernels_say


def infer(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: tuple[Meta, ...],
    lifted: Sequence[float] = (),
) -> tuple[Meta | None, ...]:
    """Ask torch what `op` returns, by running it on meta tensors.

    Args:
        op: any aten overload.
        args: its arguments, with `Slot` for tensors and `Lift` for lifted floats.
        kwargs: likewise.
        metas: the meta of each slot.
        lifted: the present value of each lifted float (torch checks some).
    """
    tensors = [meta.tensor() for meta in metas]

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return tensors[leaf.number]
        return lifted[leaf.number] if isinstance(leaf, Lift) else leaf

    real_kwargs = {name: map_leaves(real, value) for name, value in kwargs.items()}
    if "device" in real_kwargs:
        real_kwargs["device"] = "meta"
    real_kwargs.pop("pin_memory", None)
    real_args = tuple(map_leaves(real, arg) for arg in args)
    checks.check(op, real_args, real_kwargs)
    try:
        got = registry.shape_function(op)(*real_args, **real_kwargs)
    except NotImplementedError:
        if registry.find(op) is None:
            raise NotImplementedError(missing(op)) from None
        raise
    except (AssertionError, ValueError, RuntimeError) as error:
        known = as_kernels_say(error)
        if known is error:
            raise
        raise known from None
    flat: list[Any] = []
    for value in got if isinstance(got, tuple | list) else [got]:
        flat += value if isinstance(value, tuple | list) else [value]
    return tuple(None if value is None else Meta.of(value) for value in flat)


def missing(op: OpOverload) -> str:
    """The message for an operator that cannot be computed."""
    return (
        f"{op} has no JAX lowering and torch has no decomposition for it. Give one with "
        f"isoshard.torch_bridge.register_lowering({op.name()!r}, function), where function takes "
        f"JAX arrays in the order of {schema_of(op)}; or move the tensors to the CPU with .cpu() "
        "for this operator."
    )
