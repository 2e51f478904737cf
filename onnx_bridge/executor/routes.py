"""The shardings of the values that enter each pipeline stage.

A value has the sharding of its first reader in the stage; else that of its producer, over the
stage's own devices. Where the file has neither, the compiler has chosen one: the stage that
produces the value is compiled once more to read it, once for each set of input shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from .program import Program

Shapes = dict[str, jax.ShapeDtypeStruct]
Route = dict[str, NamedSharding]  # of one stage: the layout of each value that enters it


def carried_sharding(sharding: Any, mesh: Mesh) -> NamedSharding:
    """The same spec over the mesh of another stage; replicated if the meshes differ in shape.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> devices = jax.devices()
        >>> meshes = [make_mesh((4,), ("x",), devices=devices[at : at + 4]) for at in (0, 4)]
        >>> carried_sharding(NamedSharding(meshes[0], jax.P("x")), meshes[1]).spec
        P('x',)
    """
    if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape):
        return NamedSharding(mesh, sharding.spec)
    return NamedSharding(mesh, jax.P())


class Routes:
    """The routes of a model's values into its stages.

    Args:
        programs: the stages, in order.
        tensors: for each stage the shapes of its parameters and tables.
        jitted: the stages as functions of `jax.jit`.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        tensors: Sequence[tuple[Shapes, Shapes]],
        jitted: Sequence[Any],
    ) -> None:
        """Read the file's annotations."""
        self._programs, self._tensors, self._jitted = programs, tensors, jitted
        self._annotations: list[dict[str, Any]] = [
            {name: _annotated(programs, program, name) for name in program.inputs}
            for program in programs
        ]
        self._cache: dict[Any, list[Route]] = {}

    def of(self, inputs: Mapping[str, Any]) -> list[Route]:
        """The routes for inputs of some shapes."""
        if all(where is not None for route in self._annotations for where in route.values()):
            return self._annotations
        shapes = abstract(inputs)
        key = tuple((name, x.shape, str(x.dtype)) for name, x in shapes.items())
        if key not in self._cache:
            self._cache[key] = self._follow(shapes, [])
        return self._cache[key]

    def lowered(self, shapes: Shapes) -> list[Any]:
        """Lower each stage; nothing is allocated, and every value's size is checked."""
        done: list[Any] = []
        self._follow(shapes, done)
        return done

    def _follow(self, shapes: Shapes, done: list[Any]) -> list[Route]:
        values: dict[str, Any] = dict(shapes)
        outputs: dict[str, Any] = {}
        routes = []
        for index, program in enumerate(self._programs):
            annotations = self._annotations[index]
            route = {
                name: where if where is not None else carried_sharding(outputs[name], program.mesh)
                for name, where in annotations.items()
            }
            entering = {
                name: jax.ShapeDtypeStruct(values[name].shape, values[name].dtype, sharding=where)
                for name, where in route.items()
            }
            with program.context():
                lowered = self._jitted[index].lower(*self._tensors[index], entering)
            values.update(lowered.out_info)
            later = (name for route in self._annotations[index + 1 :] for name in route.items())
            if any(where is None and name in program.outputs for name, where in later):
                outputs |= lowered.compile().output_shardings
            routes.append(route)
            done.append(lowered)
        return routes


def abstract(values: Mapping[str, Any]) -> Shapes:
    """Shapes and dtypes of arrays, with JAX's dtypes.

    Example:
        >>> import numpy as np
        >>> abstract({"ids": np.zeros((2, 3), np.int64)})
        {'ids': ShapeDtypeStruct(shape=(2, 3), dtype=int32)}
    """
    return {
        name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in values.items()
    }


def _annotated(programs: Sequence[Program], program: Program, name: str) -> NamedSharding | None:
    """The sharding that the file has for a value that enters a stage, or None."""
    layout = program.layout
    read_as = program.reads_as(name)
    if read_as is not None:
        return read_as
    if name in layout.inputs:
        return carried_sharding(layout.inputs[name], program.mesh)
    maker = layout.graph.producer(name)
    written_as = None if maker is None else layout.sharding(maker.index, name)
    return None if written_as is None else carried_sharding(written_as, program.mesh)
