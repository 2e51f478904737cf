"""Making a good ONNX file hostile: bytes changed, and fields set to what nobody expects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

NUMBERS = [-1, 0, 1, 2, 3, 7, 99, -7, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 40]
NUMBERS += [(1 << 63) - 1, -(1 << 63)]
TEXTS = ["", "x", "y", "w", "h", "tp", "../secret.bin", "/etc/passwd", "\0", "weights.bin", "up"]
TEXTS += ["link", "folder/secret.bin", "-1", "9" * 40, "offset", "length", "location", "n" * 10_000]
TEXTS += ["Add", "Reshape", "Concat", "Slice", "Gather", "Einsum", "Range", "Loop", "Nothing"]
TEXTS += ["Softmax", "LayerNormalization", "Conv", "Attention", "Expand", "Pad", "axis", "perm"]

_WHOLE = (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64, Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64)
_FRACTIONS = (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE)


def mutate(model: Message, other: Message, rng: random.Random) -> bytes:
    """Change a model.

    Args:
        model: the model; is changed.
        other: one that pieces may be taken from.
        rng: decides.

    Returns:
        The bytes of a file.
    """
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 8])):
        change_field(model, other, rng)
    data = model.SerializeToString()
    if rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2, 5])):
            data = change_bytes(data, other.SerializeToString(), rng)
    return data


def change_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or take over bytes."""
    here = rng.randrange(len(data) + 1)
    there = min(len(data), here + rng.choice([1, 1, 2, 8, 64]))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:here]
    if kind == 1:
        return data[:here] + data[there:]
    if kind == 2:
        return data[:there] + data[here:]
    if kind == 3:
        return data[:here] + rng.randbytes(there - here) + data[there:]
    if kind == 4:
        return data[:here] + rng.randbytes(rng.choice([1, 4, 10])) + data[here:]
    start = rng.randrange(len(other) + 1)
    return data[:here] + other[start : start + there - here] + data[there:]


def change_field(model: Message, other: Message, rng: random.Random) -> None:
    """Set, clear, repeat or exchange one field of one message in a model."""
    message = rng.choice(list(messages(model)))
    field = rng.choice(message.DESCRIPTOR.fields)
    there = [one for one, _ in message.ListFields()]
    if there and rng.random() < 0.7:
        field = rng.choice(there)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.cpp_type == Field.CPPTYPE_MESSAGE:
        _change_message(message, field, other, rng)
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, rng)
    else:
        setattr(message, field.name, _anything(field, rng))


def messages(root: Message) -> Iterator[Message]:
    """A message and all that it holds."""
    waiting = [root]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.cpp_type == Field.CPPTYPE_MESSAGE:
                waiting += list(value) if field.is_repeated else [value]


def _change_message(message: Message, field: Field, other: Message, rng: random.Random) -> None:
    name = field.message_type.full_name
    alike = [one for root in (message, other) for one in messages(root)]
    alike = [one for one in alike if one.DESCRIPTOR.full_name == name]
    if not alike:
        return
    data = rng.choice(alike).SerializeToString()
    value = getattr(message, field.name)
    try:
        if field.is_repeated:
            for _ in range(rng.choice([1, 1, 2, 50])):
                value.add().ParseFromString(data)
        else:
            value.ParseFromString(data)
    except DecodeError:  # nested deeper than a file can say
        message.ClearField(field.name)


def _change_list(value: Any, field: Field, rng: random.Random) -> None:
    if value and rng.random() < 0.6:
        value[rng.randrange(len(value))] = _anything(field, rng)
    else:
        value.extend(_anything(field, rng) for _ in range(rng.choice([1, 1, 2, 100])))


def _anything(field: Field, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _WHOLE:
        bits = 31 if kind in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 63
        least = 0 if kind in (Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64) else -(1 << bits)
        return max(least, min((1 << bits) - 1, rng.choice(NUMBERS)))
    if kind in _FRACTIONS:
        return rng.choice([0.0, -1.0, float("nan"), float("inf")])
    if kind == Field.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    text = rng.choice(TEXTS)
    return text if field.type == Field.TYPE_STRING else text.encode()
