"""Weights that a model keeps in other files: read, and never from outside the model's folder.

A file names them by a path, and whoever wrote the file chose that path. So the path has to be
relative, without `..`, and what it leads to after following links has to be in the folder. It is
then opened one folder at a time, without following links, so that nothing can be put in its place
between the look and the opening. Offsets and lengths are compared with the file and the tensor's
shape before memory is taken.

Source: docs/ExternalData.md of onnx.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import onnx
from onnx import TensorProto

from .contents import bytes_of, shape_error, type_name
from .walking import shown, tensors


class ByteRange(NamedTuple):
    """Where the data of one tensor is.

    Attributes:
        tensor: the tensor.
        where: in words.
        location: as the model has it.
        offset: first byte.
        length: bytes.
    """

    tensor: TensorProto
    where: str
    location: str
    offset: int
    length: int


def is_external(tensor: TensorProto) -> bool:
    """Whether a tensor's data is in another file."""
    return tensor.data_location == TensorProto.EXTERNAL or bool(tensor.external_data)


def read_external(model: onnx.ModelProto, folder: Path, most: int) -> list[str]:
    """Read the data of other files into the tensors: all of it, or none if there are errors."""
    base = Path(os.path.realpath(folder))
    errors: list[str] = []
    ranges: list[ByteRange] = []
    claimed: dict[tuple[int, int], int] = {}
    for where, tensor in tensors(model):
        if not is_external(tensor):
            continue
        try:
            range_ = _plan(where, tensor, base, claimed)
        except (_Unreadable, OSError) as error:
            errors.append(f"{where}: {error}")
        else:
            ranges.append(range_)
    total = sum(range_.length for range_ in ranges)
    if total > most:
        errors.append(f"its weights are {total} bytes, and {most} may be read: pass max_bytes")
    if errors:
        return errors
    for range_ in ranges:
        with _opened(base, range_.location) as file:
            data = os.pread(file, range_.length, range_.offset) if range_.length < 1 << 30 else b""
            while len(data) < range_.length:  # one call reads at most 2 GiB
                more = os.pread(file, range_.length - len(data), range_.offset + len(data))
                if not more:
                    return [f"{range_.where}: {shown(range_.location)} became shorter meanwhile"]
                data += more
        range_.tensor.raw_data = data
        range_.tensor.data_location = TensorProto.DEFAULT
        del range_.tensor.external_data[:]
    return []


def memory() -> int:
    """The bytes of memory this process may have: the machine's, or less if it is limited."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return total if limit == resource.RLIM_INFINITY else min(total, limit)


class _Unreadable(ValueError):
    """A shard cannot be read as the model describes it."""


def _plan(
    where: str, tensor: TensorProto, base: Path, claimed: dict[tuple[int, int], int]
) -> ByteRange:
    """Check one tensor's description against the file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    wrong = shape_error(tensor)
    if wrong:
        raise _Unreadable(wrong)
    location = entries.get("location", "")
    offset = _int_field("offset", entries.get("offset", "0"))
    with _opened(base, location) as file:
        about = os.fstat(file)
    need = bytes_of(tensor)
    rest = about.st_size - offset
    length = _int_field("length", entries["length"]) if "length" in entries else need
    if length is None:
        raise _Unreadable(f"{type_name(tensor.data_type)} needs a length, and there is none")
    if need is not None and length != need:
        raise _Unreadable(
            f"shape {tuple(tensor.dims)} of {type_name(tensor.data_type)} is {need} bytes, but its "
            f"length is {length}"
        )
    if length > rest:
        raise _Unreadable(
            f"bytes {offset} to {offset + length} of {shown(location)}, which has {about.st_size}"
        )
    # Many tensors that name the same bytes are a small file that fills the memory.
    key = (about.st_dev, about.st_ino)
    claimed[key] = claimed.get(key, 0) + length
    if claimed[key] > about.st_size:
        raise _Unreadable(
            f"tensors up to this one need {claimed[key]} bytes of {shown(location)}, which has "
            f"{about.st_size}: some share bytes, which is not supported"
        )
    return ByteRange(tensor, where, location, offset, length)


def _int_field(field: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _Unreadable(f"its {field} {shown(text)} is no number of bytes")
    return int(text)


@contextlib.contextmanager
def _opened(base: Path, location: str) -> Iterator[int]:
    """Open a file below `base` for reading; the descriptor."""
    path = PurePosixPath(location)
    if not location or "\0" in location:
        raise _Unreadable(f"its location {shown(location)} names no file")
    if path.is_absolute() or ".." in path.parts:
        raise _Unreadable(
            f"its location {shown(location)} leaves the model's folder, which is not allowed"
        )
    target = Path(os.path.realpath(base / path))
    if base != target and base not in target.parents:
        raise _Unreadable(
            f"its location {shown(location)} is a link that leaves the model's folder, which is "
            "not allowed: copy the file to the model"
        )
    components = target.relative_to(base).parts
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        directory = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, directory)
        for component in components:
            directory = os.open(component, flags, dir_fd=directory)
            stack.callback(os.close, directory)
        if not stat.S_ISREG(os.fstat(directory).st_mode):
            raise _Unreadable(f"its location {shown(location)} is no file")
        yield directory
