"""Opening a file of unknown origin: it is read, or an error has the reason.

>>> load(b"\\x08\\x0d")
Traceback (most recent call last):
    ...
isoshard.onnx_bridge.errors.ModelError: 2 bytes: not a model that can be read: it has no graph

What is checked before a model is handed out: it is not split; nodes can run in their order,
functions end, names are made once; every tensor has as much data as its shape says; data in other
files lies in the model's folder and is as long as it has to be. Nothing is allocated on the word of
the file.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import onnx
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from isoshard.core.kit import listed
from isoshard.onnx_bridge.errors import AnnotationError, AnnotationWarning, ModelError

from .contents import error_of
from .dangling import dangling
from .external import is_external, memory, read_external
from .soundness import model_errors, too_many
from .texts import text_errors
from .walking import tensors, too_deep

LARGEST = (1 << 31) - 1  # bytes of a protobuf message
_TEXTS = {".json": "json", ".onnxjson": "json", ".textproto": "textproto", ".prototxt": "textproto"}


def load(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    folder: str | os.PathLike[str] | None = None,
    strict: bool = False,
    max_bytes: int | None = None,
) -> onnx.ModelProto:
    """Load a model of unknown origin.

    Args:
        source: path of a file (.onnx; .json and .textproto as onnx writes them), its bytes, or a
            model, which is checked and is unchanged.
        folder: where data in other files lies, and nothing outside is read; by default the folder
            of the file. Bytes and models have none.
        strict: make annotations that point at nothing an error; by default they are a warning.
        max_bytes: of data in other files; by default as much as there is memory.

    Returns:
        The model, all data in it.

    Raises:
        ModelError: it cannot be read; every error in one message.
        AnnotationError: annotations point at nothing, and `strict` is set.

    Example:
        >>> from onnx import parser
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> onnx.save(model, "abs.onnx")
        >>> load("abs.onnx").graph.node[0].op_type
        'Abs'
    """
    if isinstance(source, onnx.ModelProto):
        name, model = "this model", source
    elif isinstance(source, bytes):
        name, model = f"{len(source)} bytes", _parse(source, "protobuf", f"{len(source)} bytes")
    else:
        path = Path(source)
        name, model = str(path), _parse(_read(path), _TEXTS.get(path.suffix, "protobuf"), str(path))
        folder = path.parent if folder is None else folder
    errors = too_deep(model) or too_many(model) or text_errors(model) or model_errors(model)
    if errors:
        raise _unreadable(name, errors)
    model = _with_data(name, model, folder, memory() if max_bytes is None else max_bytes)
    _report(name, dangling(model), strict)
    return model


def _read(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise _unreadable(str(path), ["it is no regular file"])
            if about.st_size > LARGEST:
                raise _unreadable(
                    str(path),
                    [
                        f"it has {about.st_size} bytes, and a model has {LARGEST} at most: keep "
                        "weights in other files (onnx.save_model, save_as_external_data=True)"
                    ],
                )
            return file.read(about.st_size)  # a limit that is larger is allocated
    except OSError as error:
        raise _unreadable(str(path), [error.strerror or str(error)]) from None


def _parse(data: bytes, form: str, name: str) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(data, format=form)
    except DecodeError as error:
        deep = "MaxDepth" in str(error)
        why = "it is nested too deeply" if deep else "it is no ONNX file, or only a part of one"
    except (
        json_format.ParseError,
        text_format.ParseError,
        UnicodeDecodeError,
        ValueError,
    ) as error:
        why = f"it is no {form} of a model: {str(error)[:200]}"
    except RecursionError:
        why = "it is nested too deeply"
    raise _unreadable(name, [why])


def _with_data(
    name: str, model: onnx.ModelProto, folder: str | os.PathLike[str] | None, most: int
) -> onnx.ModelProto:
    errors = []
    outside = False
    for where, tensor in tensors(model):
        if is_external(tensor):
            outside = True
        elif wrong := error_of(tensor):
            errors.append(f"{where}: {wrong}")
    if errors:
        raise _unreadable(name, errors)
    if not outside:
        return model
    if folder is None:
        raise _unreadable(name, ["its weights are in other files: pass folder=, where they are"])
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        errors = read_external(copy, Path(folder), most)
    except MemoryError:
        errors = ["its weights need more memory than there is"]
    if errors:
        raise _unreadable(name, errors)
    return copy


def _report(name: str, loose: list[str], strict: bool) -> None:
    if not loose:
        return
    message = (
        f"{name}: annotations point at nothing: {listed(loose, 8, '; ')}. A tool renamed or "
        "dropped what they name; annotate as the last step"
    )
    if strict:
        raise AnnotationError(message)
    warnings.warn(message, AnnotationWarning, stacklevel=3)


def _unreadable(name: str, errors: list[str]) -> ModelError:
    return ModelError(f"{name}: not a model that can be read: {listed(errors, 8, '; ')}")
