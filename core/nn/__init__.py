"""Operators over space and attention as pure JAX functions: torch's, ONNX's and domain's meet here."""

if __name__ != "isoshard.core.nn":
    raise ImportError(f"import isoshard.core.nn, not {__name__}: pip install -e . first")
