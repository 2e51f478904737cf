"""The safetensors format: eight bytes of length, a header in JSON, then the tensors' bytes.

The header maps each name to dtype, shape and the range of its bytes, counted from the header's end.
Tensors follow each other without gaps, row-major, little-endian. Source of the format:
https://huggingface.co/docs/safetensors.

>>> text = pack_header({"w": (np.dtype("float32"), (2, 3))})
>>> text[8:67]
b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}  '

No header is trusted: its length and the tensors' offsets and sizes are compared with the file
before a byte of a tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .weight_errors import FileFormatError, raise_listed

LONGEST_HEADER = 100_000_000  # bytes; what the format's own reader takes
_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    Attributes:
        name: of the tensor.
        dtype: of its elements.
        shape: of the tensor.
        file: that has it.
        offset: of its first byte from the start of the file.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the header of a file.

    Returns:
        The tensors by name in the order of their bytes, and the metadata.

    Raises:
        FileFormatError: the header is no header, or does not fit the file; all errors at once.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length < 0:
            raise FileFormatError(f"{file}: {size} bytes are no safetensors file, which has 8 more")
        if length > LONGEST_HEADER or length > size - 8:
            raise FileFormatError(
                f"{file}: the header's length would be {length} bytes; the file has {size} "
                f"bytes, and headers at most {LONGEST_HEADER}. It is cut off, or no safetensors "
                "file."
            )
        text = opened.read(length)
    entries = _parsed(text, file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise FileFormatError(f"{file}: its metadata is no mapping of strings: {metadata!r:.200}")
    begin = 8 + length
    errors: list[str] = []
    ranges = {}
    tensors = {}
    for name, entry in entries.items():
        error, stored, ends = _entry(name, entry, file, begin)
        if error or stored is None:
            errors.append(f"{name}: {error}")
        else:
            tensors[name], ranges[name] = stored, ends
    errors += _range_errors(ranges, size - begin) if not errors else []
    raise_listed(f"{file} is damaged", errors, FileFormatError)
    return dict(sorted(tensors.items(), key=lambda item: ranges[item[0]])), metadata


def pack_header(
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A header with its length in front; the tensors must follow in the same order.

    Args:
        tensors: dtype and shape by name.
        metadata: strings by name.

    Returns:
        The bytes; padded with spaces, so that tensors start on 8 bytes.

    Raises:
        FileFormatError: a dtype has no code.
    """
    codes = {name: code for code, name in _CODES.items()}
    errors = [f"{n}: {d} has no code" for n, (d, _) in tensors.items() if d.name not in codes]
    fix = f"Possible are {', '.join(codes)}."
    raise_listed("safetensors has no code for the tensors' dtypes", errors, FileFormatError, fix)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entry = {"dtype": codes[dtype.name], "shape": list(shape), "data_offsets": [at, end]}
        header[name], at = entry, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _parsed(text: bytes, file: Path) -> dict[str, Any]:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"repeated: {', '.join(twice)[:200]}")
        return dict(pairs)

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{file}: the header is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise FileFormatError(f"{file}: the header is no mapping, but a {type(entries).__name__}")
    return entries


def _entry(
    name: str, entry: Any, file: Path, begin: int
) -> tuple[str, Stored | None, tuple[int, int]]:
    """A tensor of a header: the error in it, or the tensor and its range."""
    nothing = (0, 0)
    if not isinstance(entry, dict) or {*entry} != {"dtype", "shape", "data_offsets"}:
        return f"has not dtype, shape and data_offsets: {entry!r:.200}", None, nothing
    code, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _CODES:
        packed = " (elements smaller than a byte are not supported)" if code in _PACKED else ""
        error = f"unknown dtype {code!r:.80}{packed}; known are {', '.join(_CODES)}"
        return error, None, nothing
    if not _counts(shape) or not _counts(ends) or len(ends) != 2:
        return f"shape {shape!r:.80} or offsets {ends!r:.80} are no counts", None, nothing
    stored = Stored(name, jnp.dtype(_CODES[code]), tuple(shape), file, begin + ends[0])
    if stored.nbytes != ends[1] - ends[0]:
        error = f"{code} of shape {tuple(shape)} takes {stored.nbytes} bytes, "
        return error + f"and its offsets {ends} hold {ends[1] - ends[0]}", None, nothing
    return "", stored, (ends[0], ends[1])


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )


def _range_errors(ranges: Mapping[str, tuple[int, int]], size: int) -> list[str]:
    """Ranges that overlap, leave gaps or leave the file."""
    errors = []
    at, before = 0, "the header"
    for name, (start, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if end > size:
            errors.append(f"{name}: bytes {start} to {end} of {size}: the file is cut off")
        elif start < at:
            errors.append(f"{name}: bytes {start} to {end} overlap {before}, which ends at {at}")
        elif start > at:
            errors.append(f"{name}: bytes {at} to {start} before it belong to no tensor")
        at, before = max(at, end), name
    if not errors and at < size:
        errors.append(f"bytes {at} to {size} at the end belong to no tensor")
    return errors
