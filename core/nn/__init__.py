"""Spatial operators and attention as pure JAX functions, used by all bridges and by domain."""

if __name__ != "isoshard.core.nn":
    raise ImportError(f"import isoshard.core.nn, not {__name__}: pip install -e . first")
