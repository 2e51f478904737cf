"""Files and folders of safetensors as a checkpoint: only the byte ranges of blocks are read.

>>> import tempfile, isoshard as iso
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = iso.save_safetensors(f"{folder}/model.safetensors", {"w": np.ones((4, 2), np.float32)})
...     iso.restore(folder, {"w": np.zeros((4, 2), np.float32)})["w"].sum()
np.float32(8.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from isoshard.core.checkpoint.source import Block, Entry
from isoshard.core.errors import CheckpointError
from isoshard.core.weights.file_format import Stored
from isoshard.core.weights.folder import open_weights
from isoshard.core.weights.reads import ReadRequest, reads_of
from isoshard.core.weights.weight_errors import FileFormatError

_CHUNK = 16 << 20
_ENDS = (".safetensors", ".safetensors.index.json")


def opened(path: Path) -> SafetensorsFiles | None:
    """Open a safetensors file, an index, or a folder with either; otherwise None."""
    is_safetensors = path.name.endswith(_ENDS) or (
        path.is_dir() and any(path.glob("*.safetensors"))
    )
    return SafetensorsFiles(path) if is_safetensors else None


class SafetensorsFiles:
    """A file or folder of safetensors; a `Source`.

    Args:
        path: see `opened`.

    Attributes:
        where: the path.
        entries: all tensors by name, tied tensors under each name.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path):
        """See the class."""
        self.where = str(path)
        try:
            weights = open_weights(path)
        except FileFormatError as error:
            raise CheckpointError(str(error)) from None
        self._stored = dict(weights.tensors)
        self._stored |= {name: weights.tensors[other] for name, other in weights.tied.items()}
        self.entries: Mapping[str, Entry] = {
            name: Entry(stored.shape, stored.dtype.name, stored.dtype.name)
            for name, stored in self._stored.items()
        }

    def read(self, blocks: Sequence[Block]) -> None:
        """Fill the memory of all blocks; see `Source`."""
        requests_by_tensor: dict[Stored, list[ReadRequest]] = {}
        for block in blocks:
            if block.out.size:
                start = tuple(axis.start for axis in block.index)
                requests_by_tensor.setdefault(self._stored[block.name], []).append(
                    (start, block.out)
                )
        for file in dict.fromkeys(stored.file for stored in requests_by_tensor):
            with file.open("rb") as opened:
                for stored, requests in requests_by_tensor.items():
                    if stored.file == file:
                        _fill(opened.fileno(), stored, requests)


def _fill(descriptor: int, stored: Stored, requests: Sequence[ReadRequest]) -> None:
    scratch = np.empty(0, np.uint8)
    for read in reads_of(stored.offset, stored.shape, stored.dtype, requests, _CHUNK):
        if read.buffer > scratch.nbytes:
            scratch = np.empty(max(_CHUNK, read.buffer), np.uint8)
        try:
            read.run(descriptor, scratch)
        except FileFormatError as error:
            raise CheckpointError(f"{stored.file}: {stored.name}: {error}") from None
