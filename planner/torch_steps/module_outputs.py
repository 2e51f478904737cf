"""Which values of a step are outputs of modules, and gradients of these, for planning.

Such a value gets a name in the traced program, which computes nothing. Nothing is recorded for it,
so the program is the one that training runs. What a plan says of an output holds for its gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from isoshard.core.traced.traced_step import GRADIENT, MODULE
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder

from .planning_tape import PlanningTape


class ModuleOutputs:
    """Context that notes the outputs of modules on the tape that is planned.

    Args:
        names: of modules, by id.
        gradients: whether gradients are noted, too.

    Attributes:
        used: the names of those that ran, in order of first use.
    """

    def __init__(self, names: Mapping[int, str], *, gradients: bool):
        """See the class."""
        self._names, self._gradients = names, gradients
        self._used: dict[str, None] = {}
        self._handles: list[Any] = []

    @property
    def used(self) -> tuple[str, ...]:
        """See the class."""
        return tuple(self._used)

    def __enter__(self) -> ModuleOutputs:
        """Listen to all modules."""
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        """Listen no more."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name:
            self._used.setdefault(name)

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if not name:
            return
        for leaf in pytree.tree_leaves(output):
            self._note(leaf, MODULE, name)
            if self._gradients and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._note, mark=GRADIENT, name=name))

    def _note(self, value: Any, mark: str, name: str) -> None:
        here = recorder()
        if not isinstance(here, PlanningTape) or not isinstance(value, lazy_tensor.LazyTensor):
            return
        slot, meta = value._storage.value, value._aval.meta
        whole = math.prod(meta.size) == math.prod(value._storage.aval.meta.size)
        if slot.tape is here and whole and meta.is_contiguous:
            said = here.outputs.setdefault(slot.slot, {})
            # One mark for all modules: each layer has as many, and what is before the first, too.
            before = next((one for one in said if one.startswith(GRADIENT)), None)
            if mark == GRADIENT and before:
                said[f"{before},{name}"] = said.pop(before)
            else:
                said.setdefault(mark + name, meta.size)
