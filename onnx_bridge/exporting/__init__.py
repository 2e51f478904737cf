"""Exporting: torch modules to annotated models, weights known by the names of their parameters."""

if __name__ != "isoshard.onnx_bridge.exporting":
    raise ImportError(f"import isoshard.onnx_bridge.exporting, not {__name__}")

__all__: list[str] = []
