"""The version of torch_xla whose names and meanings are offered."""

__version__ = "2.9.0+isoshard"
