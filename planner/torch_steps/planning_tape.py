"""A tape that is looked at and never executed.

Its inputs have no elements. It notes the user's line of each entry, and which values are outputs of
modules; what asks for a tensor's value is an error at the user's line, and marks on another mesh
are meant for the one that is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import CaptureError, ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Value

from .user_lines import UserLines


class PlanningTape(Tape):
    """The recorder of a step that is planned.

    Args:
        mesh: what the step is planned for, with Auto axes.
        user: tells the user's lines.

    Attributes:
        lines: of each entry the line of user code, as `Tape.program` has the entries.
        outputs: names for the values of slots, innermost first, and the shape that each has.
    """

    __slots__ = ("_mesh", "_user", "lines", "outputs")

    plans = True

    def __init__(self, mesh: Mesh, user: UserLines):
        """An empty tape."""
        super().__init__()
        self._mesh, self._user = mesh, user
        self.opened = True
        self.home = tuple(mesh.devices.flat)
        self.lines: list[str] = []
        self.outputs: dict[int, dict[str, tuple[int, ...]]] = {}

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation, and note whose it is."""
        before = len(self.program)
        found = super().record(recipe, inputs, scalars)
        self.lines += [""] * (len(self.program) - before - 1)
        self.lines.append(self._user.here())
        return found

    def line_of_user(self) -> str:
        """The line of user code that runs now."""
        return self._user.here()

    def joins(self, layout: int) -> bool:
        """Whether a layout is over the mesh that is planned; what is not will be replicated."""
        return True

    def meant(self, layout: int) -> int:
        """The layout that a mark asks for, over the mesh that is planned.

        Raises:
            ShardingError: the mark's mesh has axes that this one has not.
        """
        if layout == layout_numbers.UNPLACED or layout_numbers.devices(layout) == self.home:
            return layout
        asked = layout_numbers.layout(layout)
        mesh = mesh_of(asked) if isinstance(asked, NamedSharding) else None
        named: Any = getattr(asked, "spec", ())
        used = [
            name
            for entry in named
            if entry is not None
            for name in (entry if isinstance(entry, tuple) else (entry,))
        ]
        if mesh is None or not set(used) <= set(self._mesh.axis_names):
            raise ShardingError(
                f"{self._user.here()}: a tensor is marked with {named or asked} on a mesh with "
                f"axes {() if mesh is None else mesh.axis_names}, and the step is planned for a "
                f"mesh with axes {self._mesh.axis_names}. Name the axes of both meshes alike."
            )
        return layout_numbers.intern(NamedSharding(self._mesh, named))

    def refuse(self, what: str) -> None:
        """Refuse what a program could not be given.

        Raises:
            CaptureError: always.
        """
        self.check_execution()

    def check_execution(self) -> None:
        """Refuse what needs elements.

        Raises:
            CaptureError: always.
        """
        error = no_elements(self._user.here())
        if self.capture is not None:
            self.capture.error = error  # also where somebody catches it
        raise error


def no_elements(line: str) -> CaptureError:
    """The error of a step that asks for the value of a tensor.

    Args:
        line: the user's.
    """
    return CaptureError(
        f"{line}: the step needs the value of a tensor here (item(), float(), print, or a branch "
        "of Python on it), and a step that is planned has no data. Return the tensor from the step "
        "and read it outside; for a branch use torch.where."
    )


class ShapeOnly:
    """What stands for an array that has no elements.

    Args:
        shape: of the array.
        dtype: of the array.
        user: tells the line of who asks for more.
    """

    __slots__ = ("_user", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], user: UserLines):
        """See the class."""
        self.shape, self.dtype, self._user = shape, dtype, user

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """There is nothing to read.

        Raises:
            CaptureError: always.
        """
        raise no_elements(self._user.here())

    def __getattr__(self, name: str) -> Any:
        """Where elements lie is asked by who wants to read them."""
        if name in _OF_ELEMENTS:
            raise no_elements(self._user.here())
        raise AttributeError(name)


_OF_ELEMENTS = frozenset({"sharding", "committed", "addressable_shards", "is_fully_addressable"})
