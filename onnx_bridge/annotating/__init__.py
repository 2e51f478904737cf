"""Annotating: specs and stages written onto the nodes of a model, as the last step."""

if __name__ != "isoshard.onnx_bridge.annotating":
    raise ImportError(f"import isoshard.onnx_bridge.annotating, not {__name__}")

from .annotate import annotate

__all__ = ["annotate"]
