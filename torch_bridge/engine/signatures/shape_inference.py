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
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves
from isoshard.torch_bridge.lowerings import registry

from . import checks
from .shape_checks import as_kernel_error


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
    if op.name().startswith("aten::_foreach_"):
        firsts = _first_equal([*args, *kwargs.values()], metas, lifted)
        if len(chosen := sorted(set(firsts))) < len(firsts):  # a model's parameters: a few shapes
            few_args = tuple(_only(chosen, arg) for arg in args)
            few_kwargs = {name: _only(chosen, value) for name, value in kwargs.items()}
            outs = dict(zip(chosen, infer(op, few_args, few_kwargs, metas, lifted), strict=True))
            return tuple(outs[index] for index in firsts)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return metas[leaf.index].tensor()
        return lifted[leaf.index] if isinstance(leaf, Lift) else leaf

    real_kwargs = {name: map_leaves(real, value) for name, value in kwargs.items()}
    if "device" in real_kwargs:
        naming.check_index(real_kwargs["device"])
        real_kwargs["device"] = "meta"
    real_kwargs.pop("pin_memory", None)
    real_args = tuple(map_leaves(real, arg) for arg in args)
    checks.check(op, real_args, real_kwargs)
    try:
        outputs = registry.shape_function(op)(*real_args, **real_kwargs)
    except NotImplementedError:
        if registry.find(op) is None:
            raise NotImplementedError(missing(op)) from None
        raise
    except (AssertionError, ValueError, RuntimeError) as error:
        kernel_error = as_kernel_error(error)
        if kernel_error is error:
            raise
        raise kernel_error from None
    flat: list[Any] = []
    for value in outputs if isinstance(outputs, tuple | list) else [outputs]:
        flat += value if isinstance(value, tuple | list) else [value]
    return tuple(None if value is None else Meta.of(value) for value in flat)


def _first_equal(
    values: Sequence[Any], metas: tuple[Meta, ...], lifted: Sequence[float]
) -> list[int]:
    """For each item of lists, the index of the first identical one; [] if unclear."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return metas[leaf.index]
        value = lifted[leaf.index] if isinstance(leaf, Lift) else leaf
        return (type(value), repr(value))

    lists = [value for value in values if _is_list(value)]
    if len({len(list_) for list_ in lists}) != 1 or any(
        isinstance(list_, Slot) for list_ in values
    ):
        return []  # torch raises; a tensor may have a number for each item
    firsts: dict[Any, int] = {}
    rows = zip(*(map(kind, list_) for list_ in lists), strict=True)
    return [firsts.setdefault(row, index) for index, row in enumerate(rows)]


def _only(chosen: Sequence[int], value: Any) -> Any:
    return [value[index] for index in chosen] if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is tuple


def missing(op: OpOverload) -> str:
    """The message for an operator that cannot be computed."""
    if "sparse" in op.name():
        return (
            f"sparse tensors are not on the jax device ({op}): make the tensor dense before it "
            "moves, with t.to_dense(), or keep it on the CPU"
        )
    return (
        f"{op} has no JAX lowering and torch has no decomposition for it. Give one with "
        f"isoshard.torch_bridge.register_lowering({op.name()!r}, function), where function takes "
        f"JAX arrays in the order of {schema_of(op)}; or move the tensors to the CPU with .cpu() "
        "for this operator."
    )
