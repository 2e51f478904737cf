"""What core's verbs do with a model: `isoshard.shard` annotates it, `sharding_of` reads it.

>>> from onnx import helper
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard, sharding_of
>>> from isoshard.core.plan import Plan
>>> w = helper.make_tensor("w", 1, [8, 4], [0.0] * 32)
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 8])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 4])
>>> node = helper.make_node("MatMul", ["x", "w"], ["y"])
>>> model = helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), ir_version=11)
>>> mesh, plan = make_mesh((2, 4), ("data", "model")), Plan({"w": (None, "model")})
>>> sharding_of(shard(model, mesh, plan))["w"].spec
P(None, 'model')
>>> print(plan.resolve(model, mesh))
name  shape   dtype    spec              bytes/device  rule
w     (8, 4)  float32  P(None, 'model')          32 B  w
total 32 B on each of 8 devices, mesh (data=2, model=4)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Framework, TracedStep, mesh_of, named_sharding, no_sharing

from .annotating import annotate
from .planning import traced_onnx_step
from .reading.graph import Graph
from .reading.layout import layout
from .reading.parameters import named_leaves, parameters


class OnnxModels(Framework):
    """The verbs for `onnx.ModelProto`."""

    name = "onnx"
    warns_of_rules = True

    def owns(self, obj: Any) -> bool:
        """Whether this is a model."""
        return isinstance(obj, onnx.ModelProto)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> onnx.ModelProto:
        """An annotated copy of the model; see `annotate`."""
        if copy is False:
            raise no_sharing(name or "model", "an annotated model is a copy")
        return annotate(x, mesh, spec)

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """The shapes and dtypes of the parameters, by their names in plans."""
        return named_leaves(Graph(x))

    def traced_step(
        self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
    ) -> TracedStep:
        """See `planning.traced_onnx_step`."""
        return traced_onnx_step(step, args, kwargs, mesh, plan)

    def sharding_of(self, x: Any) -> dict[str, NamedSharding]:
        """The sharding of each parameter by its name in plans, in the first stage it is in."""
        read = layout(x)
        shardings: dict[str, NamedSharding] = {}
        for tensor, parameter in parameters(read.graph).items():
            for sharding in read.parameters.get(tensor, {}).values():
                shardings.setdefault(parameter.name, _of_weight(sharding, parameter.origin.axes))
        return shardings


def _of_weight(sharding: NamedSharding, axes: tuple[int | None, ...]) -> NamedSharding:
    """The sharding of a weight whose axes are in another order in the tensor."""
    entries = [*sharding.spec, *[None] * (len(axes) - len(sharding.spec))]
    turned = P(*(entries[axes.index(axis)] for axis in range(len(axes))))
    return named_sharding(turned, mesh_of(sharding), len(axes))
