"""One pipeline stage as one jitted function, and the limit on what it may compute.

Values are checked while the function is traced, when they are shapes and dtypes and nothing has
been allocated; so a file that asks for a terabyte is an error, not a process that dies. A stage is
computed under Auto axes, along which the compiler lays out what the file leaves open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import (
    Tracer,
    auto,
    constrain,
    human_bytes,
    is_typed,
    retyped,
    same_grid,
    under_auto,
)

from ..errors import ModelError
from ..reading.graph import Node
from ..reading.layout import ModelLayout, Stage
from .evaluating import evaluate
from .operators.operator_arguments import on_device
from .operators.unsharded_axes import on_mesh

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A stage that can run.

    Attributes:
        layout: of the model.
        stage: which nodes, and where.
        constants: values known while compiling.
        max_bytes: of any value, on all devices together.
    """

    layout: ModelLayout
    stage: Stage
    constants: Mapping[str, np.ndarray]
    max_bytes: int

    @property
    def mesh(self) -> Mesh:
        """The devices of the stage."""
        return self.stage.mesh

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it takes: the model's inputs, and results of other stages."""
        return self.stage.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that leave it."""
        return self.stage.outputs

    def reads_as(self, name: str) -> NamedSharding | None:
        """The sharding of a value at its first reader with a spec, or None."""
        inside = set(self.stage.nodes)
        readers = [node for node in self.layout.graph.consumers(name) if node.index in inside]
        shardings = (self.layout.sharding(node.index, name) for node in readers)
        return next((sharding for sharding in shardings if sharding is not None), None)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where JAX runs the stage: not under the mesh of other devices that the caller has set."""
        ambient = jax.sharding.get_abstract_mesh()
        if ambient.empty or same_grid(ambient, self.mesh):
            return contextlib.nullcontext()
        return jax.set_mesh(auto(self.mesh))

    def __call__(self, parameters: Values, tables: Values, inputs: Values) -> Values:
        """Compute the stage; a pure function of JAX arrays."""
        all_values = {**tables, **parameters, **inputs}
        values = {**self.constants, **{name: under_auto(x) for name, x in all_values.items()}}
        for name, value in values.items():
            self._check_size(value, name, None)
        nodes = [self.layout.graph.nodes[index] for index in self.stage.nodes]
        mesh = auto(self.mesh)
        with on_mesh(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            results = evaluate(
                nodes,
                values,
                self.layout.graph.opsets,
                constrain=self._constrain,
                functions=self.layout.graph.model.functions,
            )
        return {name: _as_array(results[name], name) for name in self.outputs}

    def on_users_mesh(self, name: str, value: Any) -> Any:
        """A result of the stage on its mesh, whose axes may be Explicit."""
        if not is_typed(self.mesh):
            return value
        if not isinstance(value, Tracer):
            return retyped(value, self.mesh) if isinstance(value.sharding, NamedSharding) else value
        maker = self.layout.graph.producer(name)
        annotated = None if maker is None else self.layout.sharding(maker.index, name)
        return value if annotated is None else constrain(value, annotated)

    def _constrain(self, node: Node, tensor: str, array: Any) -> Any:
        if tensor in node.outputs:
            self._check_size(array, tensor, node)
        sharding = self.layout.sharding(node.index, tensor)
        if sharding is None or not isinstance(array, Tracer):
            return array
        return constrain(array, NamedSharding(auto(sharding.mesh), sharding.spec))

    def _check_size(self, value: Any, tensor: str, node: Node | None) -> None:
        size = math.prod(np.shape(value)) * getattr(value, "dtype", np.dtype(np.int8)).itemsize
        if size > self.max_bytes:
            where = "" if node is None else f"node {node.name!r} ({node.op_type}): "
            raise ModelError(
                f"{where}value {tensor!r} of shape {tuple(np.shape(value))} takes "
                f"{human_bytes(size)}, more than {human_bytes(self.max_bytes)}; if that is meant, "
                "compile(.., max_bytes=..)"
            )


def _as_array(value: Any, name: str) -> jax.Array:
    return on_device(value, name) if isinstance(value, np.ndarray | np.generic) else value
