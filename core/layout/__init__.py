"""Shardings: meshes, specs and their spellings, tiles, and unevenly sharded arrays.

All other packages of core import this one. Nothing here moves data.
"""

if __name__ != "isoshard.core.layout":
    raise ImportError(f"import isoshard.core.layout, not {__name__}: pip install -e . first")
