"""A step as the planner takes it, of any framework.

A bridge traces the step once, without data, and declares the name, role and sharding of each input.
Depths of estimation and the search read nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import stacked_sharding

Role = Literal["parameter", "buffer", "optimizer", "input", "random", "number"]
"""The role of an input: trained; state of the model that is not trained (batch statistics, masks);
state of the optimizer; of the batch; state of a random generator; a number such as a learning
rate."""

MODULE = "module:"
"""The prefix of names that mark the output of a module in the program: `jax.ad_checkpoint`'s
primitive `name` with `module:layers.0.mlp`. It computes nothing."""

GRADIENT = "gradient:"
"""Likewise of the gradient of such an output; of several, their names joined by commas. Only a step
that is traced without a plan has these marks: a plan constrains gradients itself."""


@dataclasses.dataclass(frozen=True)
class StepInput:
    """An input array of a step.

    Attributes:
        name: of a parameter or buffer as in a plan; of optimizer state `KIND.PARAMETER`, as
            in "exp_avg.layers.0.weight"; of the batch its path in the arguments.
        role: see `Role`.
        shape: the global one.
        dtype: of the elements.
        sharding: over the step's mesh.
        follows: of optimizer state, the name of the parameter whose sharding it has.
        layers: of a stack of equal layers, the names that its rows have in the step as written;
            empty: it is no stack.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding
    follows: str | None = None
    layers: tuple[str, ...] = ()

    @property
    def layer_name(self) -> str:
        """The name as written: of a stack that of its first row."""
        return self.layers[0] if self.layers else self.name

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape as written: of a stack that of one row."""
        return self.shape[1:] if self.layers else self.shape

    @property
    def bytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's shard."""
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A result array of a step.

    Attributes:
        name: of what it replaces, or its path in the result.
        replaces: the index of the input that is donated for it; None: it is new.
        sharding: None leaves it to the partitioner.
    """

    name: str
    replaces: int | None = None
    sharding: NamedSharding | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A step, traced for a mesh and a plan.

    Attributes:
        name: of the step, for messages and titles.
        framework: "jax", "torch", "flax" or "onnx".
        program: a `jax.extend.core.ClosedJaxpr` of all `inputs`, in this order, to all `results`;
            sharding constraints in it are over `mesh`.
        inputs: in order.
        results: in order.
        mesh: over attached or described devices.
        modules: names of the model's modules, in order of first use.
        wide: it was traced with 64-bit types.
    """

    name: str
    framework: str
    program: Any
    inputs: tuple[StepInput, ...]
    results: tuple[StepResult, ...]
    mesh: Mesh
    modules: tuple[str, ...] = ()
    wide: bool = False

    def resharded(
        self, layouts: Mapping[str, NamedSharding], mesh: Mesh | None = None
    ) -> TracedStep:
        """A copy of the step with other shardings of inputs, and of the results that replace them.

        Args:
            layouts: by name of the input; optimizer state follows its parameter unless it is named.
                A stack has the sharding of its own name, or that of its first row, with an
                unsharded leading axis. Other inputs keep their shardings if the mesh is the same,
                and are replicated otherwise.
            mesh: another mesh, whose Explicit axes are Auto ones; the program must not name one.
        """
        result: Mesh = self.mesh if mesh is None else auto(mesh)
        written = {leaf.name: leaf.layer_name for leaf in self.inputs}
        inputs = []
        for leaf in self.inputs:
            names = [leaf.name] if leaf.follows is None else [leaf.name, leaf.follows]
            layout = next((layouts[name] for name in names if name in layouts), None)
            if layout is None:
                rows = (layouts.get(written.get(name, name)) for name in names)
                layout = next((row for row in rows if row is not None), None)
                if layout is not None and leaf.layers:
                    layout = stacked_sharding(layout)
            if layout is None:
                layout = (
                    leaf.sharding if result is self.mesh else NamedSharding(result, PartitionSpec())
                )
            inputs.append(dataclasses.replace(leaf, sharding=layout))
        results = tuple(
            leaf
            if leaf.replaces is None
            else dataclasses.replace(leaf, sharding=inputs[leaf.replaces].sharding)
            for leaf in self.results
        )
        return dataclasses.replace(self, inputs=tuple(inputs), results=results, mesh=result)
