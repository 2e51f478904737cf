"""Folders of safetensors files, as Hugging Face writes them: one file, or several with an index.

The index `model.safetensors.index.json` has the file of each tensor. Its paths are names of
files in the same folder; one that leads elsewhere is an error, and nothing is opened there.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .file_format import LONGEST_HEADER, Stored, read_header
from .weight_errors import FileFormatError, raise_listed

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """What a file or folder holds.

    Attributes:
        tensors: by name, in the order of files and bytes.
        tied: names that are stored once, under the name given: `save_safetensors` notes them in the
            metadata.
        metadata: of the files, joined.
    """

    tensors: dict[str, Stored]
    tied: dict[str, str]
    metadata: dict[str, str]


def open_weights(path: str | Path) -> Catalogue:
    """Read the headers of a file, of an index, or of a folder that has one of them.

    Args:
        path: a `.safetensors` file, an `.index.json` file, or a folder.

    Raises:
        FileFormatError: headers or index are damaged, do not fit each other, or lead out of the
            folder.
        FileNotFoundError: there are no such files.
    """
    path = Path(path)
    entry = _entry_of(path) if path.is_dir() else path
    if not entry.exists():
        raise FileNotFoundError(f"{entry}: there is no such file or folder")
    if entry.name.endswith(".json"):
        return _indexed(entry)
    tensors, metadata = read_header(entry)
    return _catalogue(tensors, metadata)


def _entry_of(folder: Path) -> Path:
    """The index of a folder, or its only file."""
    for name in (INDEX, FILE):
        if (folder / name).exists():
            return folder / name
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    for paths in (indices, files):
        if len(paths) == 1:
            return paths[0]
        if paths:
            raise FileFormatError(
                f"{folder}: which of {', '.join(p.name for p in paths[:10])}? There is no {INDEX} "
                "that joins them; give the path of one."
            )
    raise FileNotFoundError(f"{folder}: there is no {FILE}, {INDEX} or other .safetensors file")


def _indexed(index: Path) -> Catalogue:
    file_names = _file_names(index)
    files = {name: index.parent / name for name in dict.fromkeys(file_names.values())}
    missing = [
        f"{name}: there is no such file" for name, file in files.items() if not file.exists()
    ]
    raise_listed(f"{index} names files that are missing", missing, FileFormatError)
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    errors = []
    for name, file in files.items():
        headers, more = read_header(file)
        metadata |= more
        for tensor, stored in headers.items():
            if file_names.get(tensor) == name:
                tensors[tensor] = stored
            else:
                errors.append(
                    f"{tensor}: is in {name}, and in {file_names.get(tensor)} by the index"
                )
    errors += [
        f"{tensor}: the index says {name}, which does not have it"
        for tensor, name in file_names.items()
        if tensor not in tensors
    ]
    raise_listed(f"{index} does not fit its files", errors, FileFormatError)
    return _catalogue(tensors, metadata)


def _file_names(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index."""
    if index.stat().st_size > LONGEST_HEADER:
        raise FileFormatError(f"{index}: is longer than {LONGEST_HEADER} bytes, so it is no index")
    try:
        content = json.loads(index.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{index}: is no JSON: {error}") from None
    file_names: Any = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_names, dict) or not file_names:
        raise FileFormatError(f"{index}: has no 'weight_map' from tensors to files")
    errors = [
        f"{tensor}: {name!r:.200} is no name of a file in this folder"
        for tensor, name in file_names.items()
        if not _is_inside(name)
    ]
    raise_listed(f"{index} leads out of its folder", errors, FileFormatError)
    return file_names


def _is_inside(name: Any) -> bool:
    """Whether a path is inside its folder: relative, no step up, on any system."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    windows = PureWindowsPath(name)
    segments = PurePosixPath(name).parts
    outside = windows.drive or windows.root or PurePosixPath(name).is_absolute()
    return not outside and ".." not in segments and name.endswith(".safetensors")


def _catalogue(tensors: dict[str, Stored], metadata: dict[str, str]) -> Catalogue:
    tied = {
        name: first for name, first in metadata.items() if name not in tensors and first in tensors
    }
    return Catalogue(tensors, tied, metadata)
