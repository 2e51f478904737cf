"""An annotated model as planning takes it: one pass forward, with the layouts of the file.

>>> import numpy as np
>>> from onnx import helper
>>> from isoshard.planner.machine.topologies import topology
>>> w = helper.make_tensor("w", 1, [4, 8], np.ones((4, 8), np.float32))
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 4])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 8])
>>> product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
>>> graph = helper.make_graph([product], "g", [x], [y], [w])
>>> model = helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
>>> annotated = annotate(model, mesh, {"x": ("data", None), "w": (None, "model")})
>>> batch = jax.ShapeDtypeStruct((16, 4), np.float32)
>>> for one in traced_onnx_step(annotated, (batch,), {}, mesh, None).inputs:
...     print(one.name, one.role, one.shape, one.sharding.spec)
w parameter (4, 8) P(None, 'model')
x input (16, 4) P('data',)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import onnx
from jax.sharding import Mesh

from isoshard.core.kit import TracedStep, auto, traced_jax_step

from .annotating import annotate
from .errors import ModelError
from .executor.compiling import MAX_BYTES, stage_tensors
from .executor.evaluating import require_operators
from .executor.model_inputs import Inputs
from .executor.program import Program
from .executor.tensors import sort
from .reading.layout import layout
from .reading.opening import load


def traced_onnx_step(
    model: onnx.ModelProto, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
) -> TracedStep:
    """Trace a model for a mesh, without its weights.

    Raises:
        ModelError: an input does not fit, an operator cannot run, or the model has several stages,
            which run on devices of their own.
        AnnotationError: the annotations do not fit the mesh.
    """
    mesh = auto(mesh)
    model_layout = layout(
        load(model if plan is None else annotate(model, mesh, plan)), mesh, None, "error"
    )
    if len(model_layout.stages) != 1:
        raise ModelError(
            f"the model has {len(model_layout.stages)} pipeline stages, each on devices of its "
            "own, and one step is planned on one mesh: plan a model of one stage"
        )
    graph = model_layout.graph
    require_operators(graph.nodes, graph.opsets, graph.model.functions)
    tensors, inputs = sort(graph), Inputs(graph)
    program = Program(model_layout, model_layout.stages[0], tensors.constants, MAX_BYTES)
    parameters, tables = stage_tensors(program, tensors)
    structs = None if args or kwargs else inputs.structs
    bound = inputs.bind(args, kwargs) if structs is None else structs
    structs = {
        name: jax.ShapeDtypeStruct(
            struct.shape, struct.dtype, sharding=model_layout.inputs.get(name)
        )
        for name, struct in bound.items()
    }

    def model_pass(parameters: Any, tables: Any, **inputs: Any) -> Any:
        return program(parameters, tables, inputs)

    return traced_jax_step(
        model_pass, (parameters, tables), structs, mesh, batch=tuple(structs),
        name=graph.model.graph.name or "model", framework="onnx",
    )  # fmt: skip
