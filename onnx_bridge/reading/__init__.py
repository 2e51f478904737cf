"""Reading annotated models: the graph, the annotations on its nodes, and the layout they make."""

if __name__ != "isoshard.onnx_bridge.reading":
    raise ImportError(f"import isoshard.onnx_bridge.reading, not {__name__}")

from .graph import Graph, Node

__all__ = ["Graph", "Node"]
