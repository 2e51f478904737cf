"""Which versions of Python, JAX and torch isoshard is tested with, and their environments."""
