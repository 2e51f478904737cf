"""The manifest of a checkpoint: its files, their sizes and checksums. It is written last.

A folder with a manifest is a whole checkpoint; every file of it can be checked against the
manifest, and the manifest against its own last line.

>>> manifest = Manifest(step=5, order=1, files={"a.distcp": Sum(3, 0x352441C2)})
>>> print(manifest.to_bytes().decode(), end="")
{"files": {"a.distcp": {"crc32": "352441c2", "size": 3}}, "format": 1, "order": 1, "step": 5}
f39efc46
>>> Manifest.from_bytes(manifest.to_bytes(), "5/.manifest") == manifest
True
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

from isoshard.core.errors import CheckpointError

from .store import Store

NAME = ".manifest"
"""The manifest's file name."""

_FORMAT = 1
_BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Sum:
    """What is known of a file.

    Attributes:
        size: in bytes.
        crc32: of its bytes; None if the file has checksums of its own, which are compared when it
            is read.
    """

    size: int
    crc32: int | None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: at which it was taken.
        order: larger than that of every checkpoint committed before it.
        files: every other file of its folder.
    """

    step: int
    order: int
    files: dict[str, Sum]

    def to_bytes(self) -> bytes:
        """A line of JSON, and a line with its checksum."""
        content = {
            "format": _FORMAT,
            "step": self.step,
            "order": self.order,
            "files": {
                name: {
                    "size": found.size,
                    "crc32": None if found.crc32 is None else f"{found.crc32:08x}",
                }
                for name, found in self.files.items()
            },
        }
        line = json.dumps(content, sort_keys=True).encode() + b"\n"
        return line + _signature(line)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            data: the file's bytes.
            where: its path, for messages.

        Raises:
            CheckpointError: they are not what was written, or were written by a later version.
        """
        line, end, rest = data.partition(b"\n")
        if not end or rest != _signature(line + end):
            raise CheckpointError(
                f"{where} was truncated or altered: its last line is not the checksum of the "
                "first. This checkpoint cannot be trusted; restore another step."
            )
        content: dict[str, Any] = json.loads(line)
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{where} has format {content['format']}, and this version of isoshard reads "
                f"format {_FORMAT}; read it with the version that wrote it"
            )
        files = {
            name: Sum(found["size"], found["crc32"] and int(found["crc32"], 16))
            for name, found in content["files"].items()
        }
        return cls(content["step"], content["order"], files)


def faults(store: Store, folder: str, files: dict[str, Sum]) -> list[str]:
    """What is wrong with the files of a checkpoint, one text for each that is not as written."""
    found = []
    for name, wanted in files.items():
        path = f"{folder}/{name}"
        try:
            have = Sum(store.size(path), None) if wanted.crc32 is None else sum_of(store, path)
        except FileNotFoundError:
            found.append(f"{store.full_path(path)} is missing")
            continue
        if have.size != wanted.size:
            found.append(
                f"{store.full_path(path)} has {have.size} bytes, and {wanted.size} were written"
            )
        elif have.crc32 != wanted.crc32:
            found.append(
                f"{store.full_path(path)} was altered: its CRC-32 is {have.crc32:08x}, and "
                f"{wanted.crc32:08x} was written"
            )
    return found


def sum_of(store: Store, path: str) -> Sum:
    """The size and checksum of a file, which is read."""
    size = crc = 0
    with store.reading(path) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return Sum(size, crc)


def _signature(line: bytes) -> bytes:
    return f"{zlib.crc32(line):08x}\n".encode()
