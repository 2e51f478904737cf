"""Layouts: meshes, specs and their spellings, tiles, and arrays whose axes do not divide.

What all other rooms import. Nothing here moves data.
"""

if __name__ != "isoshard.core.layout":
    raise ImportError(f"import isoshard.core.layout, not {__name__}: pip install -e . first")
