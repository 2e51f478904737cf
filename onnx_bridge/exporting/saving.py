"""Saving: an exported model as a file, large weights beside it."""

from __future__ import annotations

from pathlib import Path

import onnx

_EXTERNAL_FROM = 1 << 30  # bytes; a protobuf message ends at 2 GiB


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; from 1 GiB on its weights go into `<name>.data` beside it.

    Args:
        model: stays as it is.
        path: the file.
    """
    if model.ByteSize() < _EXTERNAL_FROM:
        onnx.save_model(model, path)
        return
    beside = f"{path.name}.data"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, path, save_as_external_data=True, location=beside)
