"""One program lowered under a name, and which tensors are its parameters.

torch_xla's `_XLAC.lowering.LoweringContext` is for scripts that hand a program to other tools.

>>> import torch, isoshard.torch_bridge as xs
>>> a, b = torch.ones(2, 3).to("jax"), torch.ones(3).to("jax")
>>> xs.sync()  # whatever waits would be lowered with it
>>> context = LoweringContext("sum_of_two")
>>> context.build([a + b])
>>> context.hlo_text().splitlines()[0].split(",")[0]
'HloModule sum_of_two'
>>> context.tensor_parameter_id(b), sorted(context.device_parameter_id_tensor_mapping())
(1, [0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from isoshard.torch_bridge.kit import (
    Aval,
    Taken,
    Value,
    interpreting,
    lazy_tensor,
    logical_dtype,
    plan_lowering,
)

from . import lowered


class LoweringContext:
    """A program that tensors wait for, not executed.

    Args:
        name: of the program.
    """

    def __init__(self, name: str = "isoshard_step"):
        """See the class."""
        self._name = name
        self._lowered: jax.stages.Lowered | None = None
        self._parameters: dict[int, Value] = {}

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lower the program that would compute tensors."""
        planned_ = lowered.planned(tensors)
        if planned_ is None:
            raise RuntimeError(
                "these tensors have values, so there is no program to lower; build it before "
                "torch_xla.sync() or anything else reads them"
            )
        plan, structs, leaves = planned_
        entries = zip(plan.program, interpreting.needed(plan.program, plan.live), strict=True)
        used = [needed for entry, needed in entries if not isinstance(entry[0], int)]
        self._lowered = plan_lowering.lowered(plan, structs, keep_unused=True)
        self._parameters = {
            index: leaf.revived() if isinstance(leaf, Taken) else leaf
            for index, (leaf, needed) in enumerate(zip(leaves, used, strict=True))
            if needed
        }

    def hlo(self) -> bytes:
        """The program as a serialized `HloModuleProto`."""
        module: Any = self._built().compiler_ir("hlo")
        return module.as_serialized_hlo_module_proto()

    def hlo_text(self) -> str:
        """The program as HLO text, before any optimisation; layouts list every device.

        Its parameters are the tensors, and after them the numbers and random words that the
        program is given.
        """
        text = lowered.listed(self._built().as_text(dialect="hlo"))
        return text.replace("jit_isoshard_step", self._name, 1)

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The tensors that are parameters, by id; nothing is copied."""
        return {parameter_id: _tensor(value) for parameter_id, value in self._parameters.items()}

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The same, copied to the CPU."""
        return {
            parameter_id: _tensor(value).cpu() for parameter_id, value in self._parameters.items()
        }

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """The id of the parameter that a tensor is; -1 if it is none."""
        value = lazy_tensor.read(tensor) if isinstance(tensor, lazy_tensor.LazyTensor) else None
        for parameter_id, parameter in self._parameters.items():
            if parameter is value:
                return parameter_id
        return -1

    def _built(self) -> jax.stages.Lowered:
        if self._lowered is None:
            raise RuntimeError("call build(tensors) first: this context has no program yet")
        return self._lowered


def _tensor(value: Value) -> torch.Tensor:
    array = value.array
    return lazy_tensor.fresh(Aval.contiguous(array.shape, logical_dtype(array.dtype)), value)
