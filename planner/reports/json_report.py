"""Reports as JSON, and back, without loss.

The form is that of the dataclasses, field by field; `version` says which set of fields it is. A
number that JSON has no word for (infinite, not a number) is written as a string.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .report import Report

VERSION = 1


def written(report: Report) -> str:
    """Write a report."""
    content = {"isoshard_report": VERSION, **_plain(report)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read(kind: type[Report], text: str) -> Report:
    """Read a report.

    Raises:
        ValueError: the text is no report, lacks something, or is of another version.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no report: no JSON, {error}") from None
    if not isinstance(content, dict) or "isoshard_report" not in content:
        raise ValueError("this is no report: it has no 'isoshard_report' with a version")
    version = content.pop("isoshard_report")
    if version != VERSION:
        raise ValueError(
            f"the report is of version {version!r}, and this isoshard reads version {VERSION}; "
            "make it again, or read it with the isoshard that wrote it"
        )
    return _typed(kind, content, "report")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool) or value is None:
        return value
    plain = value.item() if hasattr(value, "item") else value  # of NumPy
    return plain if math.isfinite(plain) else str(plain)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """A value of JSON as the type of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    if origin is tuple:
        items = _expected(list, value, where)
        return tuple(_typed(arguments[0], item, f"{where}[{at}]") for at, item in enumerate(items))
    if origin is not None and issubclass(_as_class(origin), Mapping):
        pairs = _expected(dict, value, where).items()
        return {key: _typed(arguments[1], pair, f"{where}[{key!r}]") for key, pair in pairs}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}, and can be {', '.join(map(repr, arguments))}")
        return value
    if hint is float and isinstance(value, int | float | str):
        return float(value)
    return _expected(hint, value, where)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    content = _expected(dict, value, where)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if (missing := sorted(needed - set(content))) or (
        unknown := sorted(set(content) - set(fields))
    ):
        text = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ValueError(f"{where} {text}: the file is not one that isoshard wrote")
    return kind(
        **{
            name: _typed(hints[name], field_value, f"{where}.{name}")
            for name, field_value in content.items()
        }
    )


def _expected(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r}, and should be of type {kind.__name__}")
    return value


def _as_class(origin: Any) -> type:
    return origin if isinstance(origin, type) else types.NoneType
