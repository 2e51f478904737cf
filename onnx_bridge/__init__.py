"""The ONNX world: models that carry shardings and pipeline stages, written, checked and run.

ONNX can say how each tensor of a node is split over devices since IR version 11. Here such an
annotation is a `NamedSharding` on one side and a file on the other.

>>> from onnx import helper
>>> from isoshard.core.layout.mesh import make_mesh
>>> w = helper.make_tensor("w", 1, [8, 4], [0.0] * 32)
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 8])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 4])
>>> node = helper.make_node("MatMul", ["x", "w"], ["y"])
>>> model = helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), ir_version=11)
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> annotated = annotate(model, mesh, {"x": ("data", None), "w": (None, "model")})
>>> layout(annotated).parameters["w"][0].spec
P(None, 'model')

With this package loaded, `isoshard.shard(model, mesh, plan)` annotates a model, `Plan.resolve`
takes one, and `isoshard.sharding_of` reads one. torch is loaded when `export_torch` is named,
jax2onnx when `export_jax` is called.
"""

if not __name__.startswith("isoshard."):
    raise ImportError(
        f"this folder is the package isoshard.onnx_bridge, imported here as {__name__!r}, which "
        "would make every class twice; install the project (pip install -e .) and import isoshard"
    )

import importlib
from typing import TYPE_CHECKING, Any

from isoshard.core.kit import install_command

try:
    import onnx as _onnx  # noqa: F401 (asked for here, so that its absence is told once and well)
except ModuleNotFoundError as error:
    if error.name != "onnx":
        raise
    raise ModuleNotFoundError(
        f"onnx is not installed; get it with {install_command('onnx')}", name="onnx"
    ) from None

from isoshard.core.kit import register

from .annotating import annotate
from .checking import Finding, validate
from .errors import AnnotationError, AnnotationWarning, ModelError
from .executor.compiling import Compiled, compile
from .executor.operators import operator
from .exporting.jax_export import export_jax
from .layouts import from_sharding_spec, to_sharding_spec
from .models import OnnxModels
from .reading.graph import Graph, Node
from .reading.layout import ModelLayout, Stage, layout
from .reading.opening import load
from .reading.parameter_record import parameters_of

if TYPE_CHECKING:
    from .exporting.torch_export import export_torch

__all__ = [
    "AnnotationError",
    "AnnotationWarning",
    "Compiled",
    "Finding",
    "Graph",
    "ModelError",
    "ModelLayout",
    "Node",
    "Stage",
    "annotate",
    "compile",
    "export_jax",
    "export_torch",
    "from_sharding_spec",
    "layout",
    "load",
    "operator",
    "parameters_of",
    "to_sharding_spec",
    "validate",
]

_LAZY = {"export_torch": ".exporting.torch_export"}

register(OnnxModels())


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first named."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return sorted(__all__)
