"""Weights that a model keeps in other files: read, and never from outside the model's folder.

A file names them by a path, and whoever wrote the file chose that path. So the path has to be
relative, without `..`, and what it leads to after following links has to lie in the folder. It is
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

from .contents import bytes_of, shape_fault, type_name
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
    faults: list[str] = []
    pieces: list[ByteRange] = []
    claimed: dict[tuple[int, int], int] = {}
    for where, tensor in tensors(model):
        if not is_external(tensor):
            continue
        try:
            piece = _plan(where, tensor, base, claimed)
        except (_Refused, OSError) as error:
            faults.append(f"{where}: {error}")
        else:
            pieces.append(piece)
    total = sum(piece.length for piece in pieces)
    if total > most:
        faults.append(f"its weights are {total} bytes, and {most} may be read: pass max_bytes")
    if faults:
        return faults
    for piece in pieces:
        with _opened(base, piece.location) as file:
            data = os.pread(file, piece.length, piece.offset) if piece.length < 1 << 30 else b""
            while len(data) < piece.length:  # one call reads at most 2 GiB
                more = os.pread(file, piece.length - len(data), piece.offset + len(data))
                if not more:
                    return [f"{piece.where}: {shown(piece.location)} became shorter meanwhile"]
                data += more
        piece.tensor.raw_data = data
        piece.tensor.data_location = TensorProto.DEFAULT
        del piece.tensor.external_data[:]
    return []


def memory() -> int:
    """The bytes of memory this process may have: the machine's, or less if it is limited."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return there if limit == resource.RLIM_INFINITY else min(there, limit)


class _Refused(ValueError):
    """A piece cannot be read as the model describes it."""


def _plan(
    where: str, tensor: TensorProto, base: Path, claimed: dict[tuple[int, int], int]
) -> ByteRange:
    """Check one tensor's description against the file."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    wrong = shape_fault(tensor)
    if wrong:
        raise _Refused(wrong)
    location = said.get("location", "")
    offset = _number("offset", said.get("offset", "0"))
    with _opened(base, location) as file:
        about = os.fstat(file)
    need = bytes_of(tensor)
    rest = about.st_size - offset
    length = _number("length", said["length"]) if "length" in said else need
    if length is None:
        raise _Refused(f"{type_name(tensor.data_type)} needs a length, and there is none")
    if need is not None and length != need:
        raise _Refused(
            f"shape {tuple(tensor.dims)} of {type_name(tensor.data_type)} is {need} bytes, but its "
            f"length is {length}"
        )
    if length > rest:
        raise _Refused(
            f"bytes {offset} to {offset + length} of {shown(location)}, which has {about.st_size}"
        )
    # Many tensors that name the same bytes are a small file that fills the memory.
    key = (about.st_dev, about.st_ino)
    claimed[key] = claimed.get(key, 0) + length
    if claimed[key] > about.st_size:
        raise _Refused(
            f"tensors up to this one ask {claimed[key]} bytes of {shown(location)}, which has "
            f"{about.st_size}: some share bytes, which is not read"
        )
    return ByteRange(tensor, where, location, offset, length)


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _Refused(f"its {what} {shown(text)} is no number of bytes")
    return int(text)


@contextlib.contextmanager
def _opened(base: Path, location: str) -> Iterator[int]:
    """Open a file below `base` for reading; the descriptor."""
    path = PurePosixPath(location)
    if not location or "\0" in location:
        raise _Refused(f"its location {shown(location)} names no file")
    if path.is_absolute() or ".." in path.parts:
        raise _Refused(
            f"its location {shown(location)} leaves the model's folder, which is refused"
        )
    target = Path(os.path.realpath(base / path))
    if base != target and base not in target.parents:
        raise _Refused(
            f"its location {shown(location)} is a link that leaves the model's folder, which is "
            "refused: copy the file to the model"
        )
    parts = target.relative_to(base).parts
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        here = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, here)
        for part in parts:
            here = os.open(part, flags, dir_fd=here)
            stack.callback(os.close, here)
        if not stat.S_ISREG(os.fstat(here).st_mode):
            raise _Refused(f"its location {shown(location)} is no file")
        yield here
