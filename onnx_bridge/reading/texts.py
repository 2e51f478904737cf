"""Whether every text in a model is text: a file may have bytes there that are no UTF-8.

protobuf hands such a field out as bytes, and whoever compares or prints it as a name goes wrong.

>>> from onnx import ModelProto
>>> broken = ModelProto.FromString(bytes([0x12, 1, 0xFF]))      # field 2, one byte: producer_name
>>> text_errors(broken)
["a text (producer_name of ModelProto) is no UTF-8: b'\\\\xff'"]
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

_LONGEST = 40
_TENSOR = ("name", "doc_string")


def text_errors(model: ModelProto) -> list[str]:
    """Find texts that are none."""
    waiting: list[Message] = [model]
    while waiting:
        message = waiting.pop()
        if isinstance(message, TensorProto):  # whose other fields are data, and may be large
            wrong = next((name for name in _TENSOR if _no_text(getattr(message, name))), None)
            if wrong:
                return [_error(message, wrong, getattr(message, wrong))]
            waiting += [*message.external_data, *message.metadata_props]
            continue
        for field, value in message.ListFields():
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                waiting += [value] if isinstance(value, Message) else value
            elif field.type == FieldDescriptor.TYPE_STRING:
                for text in [value] if isinstance(value, str | bytes) else value:
                    if _no_text(text):
                        return [_error(message, field.name, text)]
    return []


def _no_text(value: object) -> bool:
    return not isinstance(value, str)


def _error(message: Message, field: str, value: object) -> str:
    where = f"{field} of {message.DESCRIPTOR.name}"
    return f"a text ({where}) is no UTF-8: {repr(value)[:_LONGEST]}"
