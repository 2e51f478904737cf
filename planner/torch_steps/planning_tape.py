"""A tape that is read and never executed.

Its inputs have no elements. It notes the user's line of each entry, and which values are outputs of
modules; reading a tensor's value is an error at the user's line, and marks on another mesh are
applied to the mesh of the plan.

An output of a module, or its gradient, gets a name in the traced program, which computes nothing.
Nothing is recorded for it, so the program is the one that training runs. The activation rule of an
output holds for its gradient, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from isoshard.core.kit import GRADIENT, MODULE, CaptureError, ShardingError, mesh_of
from isoshard.torch_bridge.kit import (
    Tape,
    lazy_tensor,
    pytree,
    recorder,
    sharding_ids,
    user_line,
)


class PlanningTape(Tape):
    """The recorder of a step that is planned.

    Args:
        mesh: the mesh of the plan, with Auto axes.

    Attributes:
        outputs: names for the values of slots, innermost first, and the shape that each has.
    """

    __slots__ = ("_mesh", "outputs")

    plans = True

    def __init__(self, mesh: Mesh):
        """An empty tape."""
        super().__init__()
        self._mesh = mesh
        self.repeated = None  # marks and hooks of a plan: no program that ran is like it
        self.opened = True
        self.devices = tuple(mesh.devices.flat)
        self.outputs: dict[int, dict[str, tuple[int, ...]]] = {}

    def joins(self, layout: int) -> bool:
        """Whether a layout is over the mesh of the plan; all are, by `meant`."""
        return True

    def meant(self, layout: int) -> int:
        """The layout that a mark requests, over the mesh of the plan.

        Raises:
            ShardingError: the mark's mesh has axes that this one has not.
        """
        if layout == sharding_ids.UNPLACED or sharding_ids.devices(layout) == self.devices:
            return layout
        requested = sharding_ids.layout(layout)
        mesh = mesh_of(requested) if isinstance(requested, NamedSharding) else None
        named: Any = getattr(requested, "spec", ())
        used = [
            name
            for entry in named
            if entry is not None
            for name in (entry if isinstance(entry, tuple) else (entry,))
        ]
        if mesh is None or not set(used) <= set(self._mesh.axis_names):
            raise ShardingError(
                f"{user_line()}: a tensor is marked with {named or requested} on a mesh "
                f"with axes {() if mesh is None else mesh.axis_names}, and the step is planned for "
                f"a mesh with axes {self._mesh.axis_names}. Use the same axis names in both."
            )
        return sharding_ids.intern(NamedSharding(self._mesh, named))

    def refuse(self, what: str) -> None:
        """Raise, where a capture would take an input that has no place in a program.

        Raises:
            CaptureError: always.
        """
        self.check_execution()

    def check_execution(self) -> None:
        """Raise, since execution needs elements.

        Raises:
            CaptureError: always.
        """
        error = no_elements(user_line())
        if self.capture is not None:
            self.capture.error = error  # also where somebody catches it
        raise error


def no_elements(line: str) -> CaptureError:
    """The error of a step that reads the value of a tensor."""
    return CaptureError(
        f"{line}: the step needs the value of a tensor here (item(), float(), print, or a branch "
        "of Python on it), and a step that is planned has no data. Return the tensor from the step "
        "and read it outside; for a branch use torch.where."
    )


class ShapeOnly:
    """A stub of an array without elements.

    Args:
        shape: of the array.
        dtype: of the array.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        """See the class."""
        self.shape, self.dtype = shape, dtype

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """There is nothing to read."""
        raise no_elements(user_line())

    def __getattr__(self, name: str) -> Any:
        """Raise for attributes that only readers of elements use."""
        if name in _OF_ELEMENTS:
            raise no_elements(user_line())
        raise AttributeError(name)


_OF_ELEMENTS = frozenset({"sharding", "committed", "addressable_shards", "is_fully_addressable"})


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
        current = recorder()
        if not isinstance(current, PlanningTape) or not isinstance(value, lazy_tensor.LazyTensor):
            return
        slot, meta = value._storage.value, value._aval.meta
        is_full = math.prod(meta.size) == math.prod(value._storage.aval.meta.size)
        if slot.tape is current and is_full and meta.is_contiguous:
            names = current.outputs.setdefault(slot.slot, {})
            # One mark for all modules, so that every layer has the same number of equations.
            before = next((name_ for name_ in names if name_.startswith(GRADIENT)), None)
            if mark == GRADIENT and before:
                names[f"{before},{name}"] = names.pop(before)
            else:
                names.setdefault(mark + name, meta.size)
