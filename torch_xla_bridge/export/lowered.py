"""What is recorded, as text: StableHLO, HLO, or the entries of the tape. Nothing is executed.

>>> import torch, isoshard.torch_bridge as xs
>>> x = torch.ones(2, 3, device="jax")
>>> xs.sync()
>>> y = (x @ x.T).exp()
>>> print(tape_text([y]))
IR {
  %0 = f32[2,3] input()
  %1 = view(%0)
  %2 = aten::mm(%0, %1)
  ROOT %3 = aten::exp(%2)
}
>>> "stablehlo.dot_general" in stablehlo([y])
True
>>> xs.sync()
>>> stablehlo([y])                            # it has a value: there is nothing to compute
''
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import export

from isoshard.core.kit import Tiles, to_op_sharding
from isoshard.torch_bridge.kit import (
    CompileRequest,
    check_env_flag,
    input_placement,
    interpreting,
    lazy_tensor,
    plan_lowering,
    request_of,
    sharding_ids,
)
from isoshard.torch_bridge.kit import tape as tapes

_SHORT = {"float": "f", "int": "s", "uint": "u", "complex": "c", "bfloat": "bf"}


def stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The StableHLO module that would compute tensors."""
    planned_ = _plan(tensors)
    return "" if planned_ is None else _lower(*planned_).as_text()


def hlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The same as HLO, before any optimisation; layouts list every device.

    While the environment variable `XLA_DUMP_POST_OPTIMIZATIONS` is set to 1 or true it is what
    XLA makes of the program, which is compiled for it: with the collectives, and the shapes of one
    device's part.
    """
    tensors = None if tensors is None else [_buffer(tensor) for tensor in tensors]
    planned_ = _plan(tensors)
    if planned_ is not None:
        lowered = _lower(*planned_)
    elif tensors:
        lowered = _identity(tensors)
    else:
        return ""
    if check_env_flag("XLA_DUMP_POST_OPTIMIZATIONS"):
        return listed(lowered.compile().as_text() or "")
    return listed(lowered.as_text(dialect="hlo"))


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The shards of a manual tensor, one above the other; another tensor as it is."""
    return getattr(tensor, "stacked", tensor)


def _identity(tensors: Sequence[torch.Tensor]) -> jax.stages.Lowered:
    """The program that returns its inputs: tensors that nothing has to be computed for."""
    leaves = [lazy_tensor.read(_checked(tensor)) for tensor in tensors]
    structs = _structs(leaves, [leaf.layout for leaf in leaves])
    with jax.enable_x64(True):
        return jax.jit(lambda *arrays: arrays).lower(*structs)


def bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """The same as a portable StableHLO artifact, which later versions of XLA read as well."""
    planned_ = _plan(tensors)
    if planned_ is None:
        return b""
    plan, structs = planned_
    custom = set(re.findall(r"stablehlo\.custom_call @([\w.]+)", _lower(plan, structs).as_text()))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(custom)]
    arguments = (*structs, *plan_lowering.extra_inputs(plan))
    alone = jax.set_mesh(NO_MESH)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), alone:
        function = jax.jit(plan_lowering.traceable(plan))
        return export.export(function, disabled_checks=checks)(*arguments).mlir_module_serialized


def tape_text(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The recorded operations that tensors depend on, one per line."""
    planned_ = _plan(tensors)
    if planned_ is None:
        return ""
    plan, structs = planned_
    inputs = iter(structs)
    names: dict[int, str] = {}
    lines, slot = ["IR {"], 0
    for entry, needed in zip(
        plan.program, interpreting.needed(plan.program, plan.live), strict=True
    ):
        if isinstance(entry[0], int):
            recipe = tapes.RECIPES[entry[0]]
            count, kind = recipe.count, recipe.name
            arguments = ", ".join(names.get(result_id, "%?") for result_id in entry[1:])
            line = f"{kind}({arguments}){_mark(recipe)}"
        else:
            count, struct = 1, next(inputs)
            layout = _layout(struct.sharding, len(struct.shape))
            line = f"{short(struct.dtype, struct.shape)} input(){layout}"
        if needed:
            result_id = len(lines) - 1
            several = count > 1
            names |= {slot + n: f"%{result_id}" + f".{n}" * several for n in range(count)}
            root = "ROOT " * (
                not plan.live or not {*range(slot, slot + count)}.isdisjoint(plan.live)
            )
            lines.append(f"  {root}%{result_id} = {line}")
        slot += count
    return "\n".join([*lines, "}"])


NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
"""Entered where a program is exported, whatever mesh its caller has set."""


def _plan(tensors: Sequence[torch.Tensor] | None) -> tuple[CompileRequest, list[Any]] | None:
    """What would be executed, and its inputs' shapes and layouts; None if nothing would be."""
    planned_ = planned(tensors)
    return None if planned_ is None else planned_[:2]


def planned(
    tensors: Sequence[torch.Tensor] | None,
) -> tuple[CompileRequest, list[Any], list[Any]] | None:
    """What would be executed."""
    if tensors:
        values = [lazy_tensor.read(_checked(tensor)) for tensor in tensors]
        waiting = [value for value in values if value.array is None]
        if not waiting:
            return None
        tape = waiting[0].tape
        if any(value.tape is not tape for value in waiting):
            raise RuntimeError(
                "these tensors were recorded by several threads, so no program has them all; call "
                "torch_xla.sync() in each thread, or pass the tensors of one thread"
            )
        plan = request_of(tape)
        slots = {value.slot: value for value in waiting}
        plan.live, plan.result_layouts = (
            tuple(slots),
            tuple(value.layout for value in slots.values()),
        )
    else:
        tape = tapes.recorder()
        if not isinstance(tape, tapes.Tape) or not tape.program:
            return None
        plan = request_of(tape)
        if not plan.live:
            return None
    plan.donated = ()
    leaves = tape.inputs()
    also = {*tape.marks, *plan.result_layouts} - {sharding_ids.UNPLACED}
    plan.placed = tuple(input_placement.planned(leaves, also))
    return plan, _structs(leaves, plan.placed), leaves


def _structs(leaves: Sequence[Any], placed: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings of a program's inputs."""
    return [
        jax.ShapeDtypeStruct(
            leaf.array.shape,
            leaf.array.dtype,
            sharding=None
            if layout_id == sharding_ids.UNPLACED
            else sharding_ids.sharding(layout_id),
        )
        for leaf, layout_id in zip(leaves, placed, strict=True)
    ]


def _checked(tensor: torch.Tensor) -> lazy_tensor.LazyTensor:
    if not isinstance(tensor, lazy_tensor.LazyTensor):
        raise RuntimeError(
            f"a tensor on {getattr(tensor, 'device', type(tensor).__name__)} has no recorded "
            "operations; move it with .to(torch_xla.device())"
        )
    return tensor


def _lower(plan: CompileRequest, structs: list[Any]) -> jax.stages.Lowered:
    return plan_lowering.lowered(plan, structs, keep_unused=False)


def short(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and a shape as XLA writes them.

    >>> short(np.dtype("float32"), (2, 3))
    'f32[2,3]'
    """
    name = dtype.name
    kind = name.rstrip("0123456789")
    written = name.replace(kind, _SHORT[kind], 1) if kind in _SHORT else name
    return f"{written}[{','.join(map(str, shape))}]"


def _layout(sharding: Any, rank: int) -> str:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ""
    return f", sharding={to_op_sharding(Tiles.from_sharding(sharding, rank))}"


def _mark(recipe: tapes.Recipe) -> str:
    if recipe.name != "mark_sharding":
        return ""
    sharding: Any = sharding_ids.sharding(recipe.detail)
    return _layout(sharding, max(len(sharding.spec), 1))


_COUNTED = re.compile(r"devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def listed(text: str) -> str:
    """Layouts with their devices one by one, in the place of XLA's short form."""

    def devices(match: re.Match[str]) -> str:
        grid, counts, turn = match.groups()
        device_grid = np.arange(math.prod(_ints(counts))).reshape(_ints(counts))
        turned = device_grid.transpose(_ints(turn)) if turn else device_grid
        return f"devices=[{grid}]{','.join(map(str, turned.ravel()))}"

    return _COUNTED.sub(devices, text)


def _ints(text: str) -> list[int]:
    return [int(digits) for digits in text.split(",")]
