"""The error of checkpoints: one was not written, or is not what was written."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, lacks something, or was altered after it was written."""
